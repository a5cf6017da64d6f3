"""The fragments of a page of docs/ run as they are printed, one after another, in one Ray.

A ``py`` fence after ``<!-- run -->`` is run, all of a page in one namespace; one after ``<!-- run gpu -->`` only where
there are two GPUs. A page begins with its own imports and leaves no group behind. Fences marked ``python`` are whole
programs: see ``test_readme``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
#: Pages that run each time; an actor costs about a second, so the others are slow.
QUICK = {"howto/calls.md", "howto/many-callers.md", "howto/tensors.md"}

_FENCE = re.compile(r"^<!-- run(?P<gpu> gpu)? -->\n```py\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[object]:
    found = []
    for path in sorted(DOCS.glob("**/*.md")):
        name, text = str(path.relative_to(DOCS)), path.read_text(encoding="utf-8")
        kinds = {bool(match["gpu"]) for match in _FENCE.finditer(text)}
        if False in kinds:
            found.append(pytest.param(name, False, id=name, marks=() if name in QUICK else pytest.mark.slow))
        if True in kinds:
            found.append(pytest.param(name, True, id=f"{name} on GPUs", marks=pytest.mark.gpu(2)))
    return found


@pytest.mark.parametrize(("page", "gpus"), pages())
@pytest.mark.usefixtures("cluster")
def test_the_fragments_of_a_page_run_in_order(page: str, gpus: bool) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    # As in a program: what is of __main__ travels to the actors by value.
    namespace: dict[str, object] = {"__name__": "__main__"}
    for match in _FENCE.finditer(text):
        if match["gpu"] and not gpus:
            continue
        above = text.count("\n", 0, match.start("code"))
        code = compile("\n" * above + match["code"], str(DOCS / page), "exec", dont_inherit=True)
        exec(code, namespace)


def test_every_mark_is_followed_by_a_fragment() -> None:
    for path in sorted(DOCS.glob("**/*.md")):
        text = path.read_text(encoding="utf-8")
        assert text.count("<!-- run") == len(_FENCE.findall(text)), f"{path.name}: a mark without its ```py fence"
