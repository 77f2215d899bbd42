"""Names on the command line: unknown names get a suggestion."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from ackstate.checks import did_you_mean


class CommandGroup(TyperGroup):
    """A group of commands that suggests a command for an unknown one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command named by the first word."""
        if args[0] not in self.commands and not args[0].startswith("-") and not ctx.resilient_parsing:
            self.refuse(ctx, args[0])
        return super().resolve_command(ctx, args)

    def refuse(self, ctx: Any, name: str) -> None:
        """Raise an error about an unknown command."""
        ctx.fail(f"unknown command {name!r}{did_you_mean(name, self.commands)}")


def usage_error_text(error: Any) -> str:
    """Return the error in the words of a command, without a full stop."""
    possibilities = getattr(error, "possibilities", None)
    if possibilities is None:
        text: str = error.format_message()
        return text.rstrip(".")
    return f"unknown option {error.option_name}{did_you_mean(error.option_name, possibilities)}"
