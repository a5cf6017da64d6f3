"""Exceptions to bytes and back: what a caller gets of what a method raised, whatever its class does."""

from __future__ import annotations

import builtins
import copy
import dataclasses
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from raytorchrpc import errors
from raytorchrpc.errors import PeerLost, RemoteError, SerializationError
from raytorchrpc.tensors.codec import Codec, Encoded
from raytorchrpc.tensors.exceptions import decode_exception, encode_exception
from raytorchrpc.tensors.kept_errors import again


class Odd(Exception):
    def __init__(self, first: int, second: int, *, tag: str) -> None:
        super().__init__(f"{first} and {second}")
        self.first, self.tag = first, tag


class OneArgument(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(f"there is no {name}")


class OddFile(OSError):
    def __init__(self, name: str) -> None:
        super().__init__(2, "gone", name)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class OwnPickling(Exception):
    __slots__ = ("secret",)

    def __init__(self, secret: int) -> None:
        self.secret = secret

    def __reduce__(self) -> Any:
        return OwnPickling, (self.secret,)


class HoldsALock(Exception):
    __slots__ = ("code",)

    def __init__(self) -> None:
        super().__init__("held")
        self.lock, self.status, self.code = threading.Lock(), 401, 7


def arrival(error: BaseException, codec: Codec | None = None) -> BaseException:
    codec = codec or Codec()
    try:
        raise error
    except BaseException as raised:
        encoded = encode_exception(codec, raised)
    return decode_exception(codec, Encoded(*copy.deepcopy(tuple(encoded))), "learner.update")


def odd_errors() -> list[Exception]:
    """Those with a state besides their arguments, or a constructor of their own."""
    return [
        Odd(1, 2, tag="t"),
        OddFile("/gone"),
        Frozen(3),
        OwnPickling(4),
        HoldsALock(),
        StopIteration(5),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        PeerLost("b", "cut", may_have_run=False),
    ]


@pytest.mark.parametrize(
    "error",
    [
        *odd_errors(),
        ValueError("plain"),
        KeyError("key"),
        OneArgument("x"),
        ValueError(threading.Lock()),
        FileNotFoundError(2, "No such file or directory", "/gone"),
        ModuleNotFoundError("No module named 'x'", name="x"),
        subprocess.CalledProcessError(3, ["false"], b"out"),
        ValueError("bad", torch.arange(1)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_arrive_as_they_were_raised(error: Exception) -> None:
    arrived = arrival(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert arrived.args == error.args or arrived.args == (str(error.args[0]),), "what cannot travel arrives as its text"
    for name in ("filename", "first", "tag", "code", "secret", "value", "name", "object", "returncode", "may_have_run"):
        assert getattr(arrived, name, None) == getattr(error, name, None), name
    cause = arrived.__cause__
    assert isinstance(cause, RemoteError)
    assert cause.type_name == f"{type(error).__module__}.{type(error).__qualname__}"
    assert "in arrival" in cause.traceback_text
    assert "learner.update" in str(cause)


OWN_ERRORS: list[errors.RayTorchRpcError] = [
    errors.RayTorchRpcError("x"),
    errors.ConfigurationError("x"),
    errors.BootstrapError("x", ("a", "b")),
    errors.NotAMember("x"),
    errors.NoSuchMethod("x"),
    errors.SerializationError("x"),
    errors.LaneUnavailable("shm", "x"),
    errors.PeerLost("a", "x", may_have_run=False),
    errors.PeerBusy("x", "a", 3, 4),
    errors.RpcTimeout("x"),
    errors.CancelledError("x"),
    errors.NotFound("x"),
    errors.Empty("x"),
    errors.Full("x", 3),
    errors.Closed("x", 3),
    errors.TransferFailed("id", "a", "x"),
    errors.ProcessGroupLost("x"),
    errors.RemoteError("x", "ValueError", "Traceback"),
]


@pytest.mark.parametrize("error", OWN_ERRORS, ids=lambda error: type(error).__name__)
def test_the_packages_own_errors_survive_pickling(error: errors.RayTorchRpcError) -> None:
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is type(error)
    assert (str(copied), copied.args, vars(copied)) == (str(error), error.args, vars(error))


def test_all_of_the_packages_own_errors_have_one_base() -> None:
    own = {
        value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and not name.startswith("_")
    }
    assert own == {type(error) for error in OWN_ERRORS}


@pytest.mark.parametrize(
    "error",
    [
        type("Local", (Exception,), {"__module__": __name__})("a class that cannot be found"),
        *(
            kind("not yours: it would end the caller's process")
            for kind in (SystemExit, KeyboardInterrupt, GeneratorExit)
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_cannot_be_raised_there_becomes_a_remote_error_with_the_text(error: Any) -> None:
    arrived = arrival(error)
    assert type(arrived) is RemoteError
    assert arrived.type_name == f"{type(error).__module__}.{type(error).__qualname__}"
    assert str(error) in str(arrived)
    assert "Traceback" in arrived.traceback_text


# --- classes that do not travel --------------------------------------------------------------------------


@pytest.fixture
def callees_module() -> Iterator[Any]:
    """A module that the test takes away between the two ends, as one that is installed at the callee alone."""
    module: Any = types.ModuleType("installed_at_the_callee")
    exec(
        "class OwnError(Exception):\n"
        "    pass\n"
        "class Exits(Exception):\n"
        "    kind = None\n"
        "    def __reduce__(self):\n"
        "        return Exits, self.args, {'on': 'the way'}\n"
        "    def __setstate__(self, state):\n"
        "        if Exits.kind is not None:\n"
        "            raise Exits.kind('asked to exit')\n",
        vars(module),
    )
    sys.modules[module.__name__] = module
    yield module
    sys.modules.pop(module.__name__, None)


def raised(error: BaseException) -> Encoded:
    try:
        raise error
    except BaseException as caught:
        return encode_exception(Codec(), caught)


def test_a_class_that_only_the_callee_can_load_arrives_as_its_traceback(callees_module: Any) -> None:
    encoded = raised(callees_module.OwnError("on purpose"))
    del sys.modules[callees_module.__name__]
    arrived = decode_exception(Codec(), encoded, "learner.update")
    assert type(arrived) is RemoteError
    assert arrived.type_name == "installed_at_the_callee.OwnError"
    assert "in raised" in arrived.traceback_text and "OwnError: on purpose" in arrived.traceback_text
    assert "cannot be unpickled here" in str(arrived) and "No module named" in str(arrived)


EXITS = [SystemExit, GeneratorExit, BaseException, type("Own", (BaseException,), {})]


@pytest.mark.parametrize("kind", [*EXITS, KeyboardInterrupt], ids=lambda kind: kind.__name__)
def test_unpickling_that_exits_ends_in_a_remote_error(callees_module: Any, kind: type[BaseException]) -> None:
    """On another thread than the main one, a KeyboardInterrupt is none of the user's."""
    encoded, arrived = raised(callees_module.Exits("on purpose")), []
    callees_module.Exits.kind = kind
    thread = threading.Thread(target=lambda: arrived.append(decode_exception(Codec(), encoded, "learner.update")))
    thread.start()
    thread.join(10)
    assert type(arrived[0]) is RemoteError
    assert arrived[0].type_name == "installed_at_the_callee.Exits"
    assert "Exits: on purpose" in arrived[0].traceback_text


class ReduceFails(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit("in __reduce__")


class ReduceLies(Exception):
    def __reduce__(self) -> Any:
        return int, (3,)


class NoText(Exception):
    def __str__(self) -> str:
        raise SystemExit("in __str__")

    __repr__ = __str__


class NoCause(Exception):
    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("frozen")


class NoGetting(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


@pytest.mark.parametrize("kind", [ReduceFails, ReduceLies, NoText, NoCause, NoGetting], ids=lambda kind: kind.__name__)
def test_a_class_that_stands_in_the_way_costs_the_type_at_most(kind: type[Exception]) -> None:
    arrived = decode_exception(Codec(), raised(kind("on purpose")), "learner.update")
    if type(arrived) is kind:
        arrived = arrived.__cause__ if kind is not NoGetting else object.__getattribute__(arrived, "__cause__")  # type: ignore[assignment]
    assert type(arrived) is RemoteError
    assert arrived.type_name.endswith(kind.__name__)
    assert "Traceback" in arrived.traceback_text or "cannot be shown" in arrived.traceback_text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 has groups of exceptions")
def test_a_group_keeps_exceptions_that_pickle_cannot_make() -> None:
    made: Any = vars(builtins)["ExceptionGroup"]
    local: Any = type("Local", (Exception,), {"__module__": __name__})
    lost = made("inner", [local("a class that cannot be found"), HoldsALock(), OwnPickling(4)])
    arrived: Any = arrival(made("outer", [Odd(1, 2, tag="t"), lost]))
    assert type(arrived) is made and arrived.message == "outer"
    odd, inner = arrived.exceptions
    assert (type(odd), str(odd), odd.tag) == (Odd, "1 and 2", "t")
    assert type(inner) is made and inner.message == "inner"
    replaced, held, own = inner.exceptions
    assert type(replaced) is RemoteError and replaced.type_name == f"{__name__}.Local"
    assert (type(held), str(held), held.status, type(own), own.secret) == (HoldsALock, "held", 401, OwnPickling, 4)
    assert "Odd: 1 and 2" in arrived.__cause__.traceback_text


def test_the_cause_of_a_remote_exception_is_in_its_text() -> None:
    try:
        try:
            raise KeyError("the cause")
        except KeyError as cause:
            raise ValueError("the error") from cause
    except ValueError as error:
        arrived = decode_exception(Codec(), encode_exception(Codec(), error), "learner.update")
    assert type(arrived) is ValueError
    assert "KeyError: 'the cause'" in str(arrived.__cause__)


def test_what_cannot_travel_in_an_exception_is_lost_alone() -> None:
    error: Any = HoldsALock()
    error.__notes__ = ["while step 3 ran", threading.Lock()]
    error.args = "held", threading.Lock(), 3
    error.inner, error.parts, error.loop = HoldsALock(), {"all": [Odd(1, 2, tag="t"), threading.Lock()]}, error
    error.inner.__cause__, error.inner.outer = KeyError("k"), error
    error.tensor, error.function, error.many = torch.ones(3), lambda: None, [threading.Lock()] * 100_000
    arrived: Any = arrival(error)
    assert type(arrived) is HoldsALock and arrived.status == 401 and arrived.tensor.tolist() == [1.0, 1.0, 1.0]
    assert arrived.args[::2] == ("held", 3) and "lock" in arrived.args[1], "an argument keeps its place"
    assert arrived.__notes__[0] == "while step 3 ran"
    assert (type(arrived.inner), arrived.inner.status) == (HoldsALock, 401)
    odd, text = arrived.parts["all"]
    assert (type(odd), odd.tag) == (Odd, "t") and "lock" in text
    lost = {"lock", "loop", "function", "many"}
    assert vars(arrived).keys() == vars(error).keys() - lost
    assert not hasattr(arrived.inner, "outer")


@pytest.mark.parametrize("error", odd_errors(), ids=lambda error: type(error).__name__)
def test_a_kept_error_is_raised_as_a_copy_that_leads_nowhere(error: Exception) -> None:
    object.__setattr__(error, "__cause__", RemoteError("text"))
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            raise again(error)
        assert raised.value is not error and error.__traceback__ is None
        assert raised.value.__cause__ is error.__cause__
        assert (str(raised.value), raised.value.args, vars(raised.value)) == (str(error), error.args, vars(error))
        for name in ("filename", "code", "secret", "value", "object", "may_have_run"):
            assert getattr(raised.value, name, None) == getattr(error, name, None), name


def test_an_error_that_passes_many_members_stays_small() -> None:
    error: BaseException = ValueError("at the very end")
    for _ in range(1000):
        error = arrival(error)
    assert type(error) is ValueError
    text = str(error.__cause__)
    assert len(text) < 200_000 and "characters left out" in text
    first, last = text.split("characters left out")
    assert first.startswith("on learner.update:\nTraceback") and "in arrival" in first and "in arrival" in last


@pytest.mark.parametrize("ends", [SystemExit, RuntimeError])
def test_an_object_whose_own_code_exits_is_an_object_that_cannot_travel(
    callees_module: Any, ends: type[BaseException]
) -> None:
    codec = Codec()
    encoded = codec.encode(callees_module.Exits("as a value"))
    callees_module.Exits.kind = ends
    expected = SerializationError if ends is SystemExit else RuntimeError
    with pytest.raises(expected, match="asked to exit"):
        codec.decode(*encoded)
    with pytest.raises(SerializationError, match="in __reduce__"):
        codec.encode(ReduceFails("as a value"))
