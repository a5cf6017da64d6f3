"""The fragments of a page of docs/, and of the README, run as they are printed, one after another, in one Ray.

A ``py`` fence after ``<!-- run -->`` is run, all of a page in one namespace; one after ``<!-- run gpu -->`` only where
there are two GPUs. What a fragment takes for granted stands in a comment that begins with ``<!-- run`` and ends with
``-->`` on lines of their own. A page leaves no group behind. Fences marked ``python`` are whole programs: see
``test_readme``.
"""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Pages that run each time; an actor costs about a second, so the others are slow.
QUICK = {"howto/calls.md", "howto/many-callers.md", "howto/tensors.md"}

_RUN = re.compile(
    r"^<!-- run(?P<gpu> gpu)?(?: -->\n```py\n(?P<code>.*?)^```|\n(?P<hidden>.*?)^-->)$", re.MULTILINE | re.DOTALL
)


def texts() -> dict[str, str]:
    """By the page's path, below docs/ if it is there."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    return {str(path.relative_to(ROOT)).removeprefix("docs/"): path.read_text(encoding="utf-8") for path in found}


def pages() -> list[object]:
    found = []
    for name, text in texts().items():
        kinds = {bool(match["gpu"]) for match in _RUN.finditer(text)}
        if False in kinds:
            found.append(pytest.param(name, False, id=name, marks=() if name in QUICK else pytest.mark.slow))
        if True in kinds:
            found.append(pytest.param(name, True, id=f"{name} on GPUs", marks=pytest.mark.gpu(2)))
    return found


@pytest.mark.parametrize(("page", "gpus"), pages())
@pytest.mark.usefixtures("cluster")
def test_the_fragments_of_a_page_run_in_order(page: str, gpus: bool) -> None:
    text = texts()[page]
    # As in a program: what is of __main__ travels to the actors by value.
    namespace: dict[str, object] = {"__name__": "__main__"}
    try:
        run(text, page, gpus, namespace)
    finally:
        # Its functions hold it, and it holds its actors, which hold the GPUs that the next page needs.
        namespace.clear()
        gc.collect()


def run(text: str, page: str, gpus: bool, namespace: dict[str, object]) -> None:
    for match in _RUN.finditer(text):
        if match["gpu"] and not gpus:
            continue
        part = "code" if match["hidden"] is None else "hidden"
        above = text.count("\n", 0, match.start(part))
        exec(compile("\n" * above + match[part], page, "exec", dont_inherit=True), namespace)


def test_every_mark_is_followed_by_a_fragment() -> None:
    for name, text in texts().items():
        assert text.count("<!-- run") == len(_RUN.findall(text)), f"{name}: a mark without its ```py fence"
