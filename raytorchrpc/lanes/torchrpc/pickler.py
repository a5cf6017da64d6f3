"""The pickler that torch's RPC uses in a member: classes and functions of the driver's ``__main__`` by value.

torch pickles them by name, which the receiver would look up in its own ``__main__``: Ray's worker script.
"""

from __future__ import annotations

import io
import pickle
from types import FunctionType, MethodType
from typing import Any

from raytorchrpc._compat import ray_internals


class RpcPickler(pickle.Pickler):
    """As ``pickle.Pickler`` until it meets a class or function of ``__main__``; from there on Ray's cloudpickle decides
    what is pickled by value.

    It does not pickle twice: pickling an RRef registers a reference with its owner.
    """

    _by_value: Any = None

    def reducer_override(self, obj: Any) -> Any:
        if self._by_value is None:
            if not isinstance(obj, (type, FunctionType)) or obj.__module__ != "__main__":
                return NotImplemented
            self._by_value = ray_internals.cloudpickler()(io.BytesIO())
        kind = type(obj)
        if kind is MethodType:  # cloudpickle would pickle class methods by value, torch's own included
            return NotImplemented
        if kind not in self.dispatch_table and (reduce := self._by_value.dispatch_table.get(kind)) is not None:
            return reduce(obj)  # what functions and classes consist of: code, cells, modules
        return self._by_value.reducer_override(obj)
