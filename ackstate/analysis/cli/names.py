"""Names on the command line: unknown names get a suggestion, old names still work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from typer.core import TyperCommand, TyperGroup

from ackstate.renamed import warn_renamed
from ackstate.spelling import did_you_mean

RENAMED_OPTIONS: Final = {
    "--trace-json": "--trace-summary", "--broker-runs": "--recorded-runs", "--baseline": "--current-policy",
}  # fmt: skip
"""Old name -> name; the old name is not in the help."""


class CommandGroup(TyperGroup):
    """A group of commands that suggests a command for an unknown one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command named by the first word."""
        if args[0] not in self.commands and not args[0].startswith("-") and not ctx.resilient_parsing:
            self.refuse(ctx, args[0])
        return super().resolve_command(ctx, args)

    def refuse(self, ctx: Any, name: str) -> None:
        """Raise an error about an unknown command."""
        ctx.fail(f"unknown command {name!r}{did_you_mean(name, self.shown_names())}")

    def shown_names(self) -> list[str]:
        """Return the names of the commands shown in the help."""
        return [name for name, command in self.commands.items() if not command.hidden]


class CommandWithOldOptions(TyperCommand):
    """A command that also accepts options by their old names."""

    renamed: ClassVar[Mapping[str, str]] = RENAMED_OPTIONS

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replace the old names, up to the word that ends the options."""
        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, [*map(self._by_new_name, args[:end]), *args[end:]])

    def _by_new_name(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if name in self.renamed:
            warn_renamed(name, self.renamed[name], category=FutureWarning)
        return f"{self.renamed.get(name, name)}{equals}{value}"


class OldCommand(TyperCommand):
    """A command under its old name, which is not in the help."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.hidden = True

    def invoke(self, ctx: Any) -> Any:
        """Warn, and run the command."""
        assert self.callback is not None
        warn_renamed(str(self.name), self.callback.__name__.replace("_", "-"), category=FutureWarning)
        return super().invoke(ctx)


def usage_error_text(error: Any) -> str:
    """Return the error in the words of a command, without a full stop."""
    possibilities = getattr(error, "possibilities", None)
    if possibilities is None:
        text: str = error.format_message()
        return text.rstrip(".")
    return f"unknown option {error.option_name}{did_you_mean(error.option_name, possibilities)}"
