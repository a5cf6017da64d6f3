"""Command classes whose help shows flags without a type."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


def _without_type(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""  # recent releases of typer show <bool> otherwise
    return params


class Command(TyperCommand):
    """One command."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type(super().get_params(ctx))


class Group(TyperGroup):
    """A command with commands of its own."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type(super().get_params(ctx))
