"""`ackstate namespaces` and `topics`: delayed-delivery policies by the commands of `pulsar-admin`.

Words, flags, output and exit status are those of `pulsar-admin`, so that a script needs only another program name. One
difference: `set-delayed-delivery` changes only the fields that are given, where `pulsar-admin` sends a whole policy and
thereby removes a maximum that is not repeated.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ackstate.analysis.admin_client import (
    AdminError,
    AdminServer,
    namespace_path,
    topic_path,
)
from ackstate.analysis.cli import console
from ackstate.analysis.cli.options import CommandGroup, duration_option, usage_error_text
from ackstate.analysis.durations import Duration
from ackstate.analysis.wording import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

# The base of Click's errors, as in `ackstate.analysis.cli.main`.
_ClickError: type[Exception] = typer.BadParameter.mro()[2]
_RESOURCE = "/delayedDelivery"


Namespace = Annotated[str, typer.Argument(metavar="TENANT/NS", help="The namespace.")]
Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="persistent://TENANT/NS/TOPIC, TENANT/NS/TOPIC or TOPIC.")]
Enable = Annotated[bool, typer.Option("--enable", "-e", help="Enable delayed delivery.")]
Disable = Annotated[bool, typer.Option("--disable", "-d", help="Disable delayed delivery.")]
TickTime = Annotated[
    Duration | None,
    duration_option("--time", "-t", plain_unit="s", least="1ms", help="Tick time, such as 1s, 10s, 1m, 5h, 3d."),
]
MaxDelay = Annotated[
    Duration | None,
    duration_option("--maxDelay", "-md", plain_unit="s", help="Longest delay allowed; 0 is no limit."),
]
FixedDelay = Annotated[
    Duration | None,
    duration_option("--fixed-delay", "-fd", plain_unit="s", help="Delay of every message; 0 is none."),
]
Applied = Annotated[bool, typer.Option("--applied", "-ap", help="The policy in effect, from any level.")]
Global = Annotated[
    bool, typer.Option("--global", "-g", help="The policy of all clusters, not supported by `ackstate serve`.")
]

LedgerId = Annotated[int, typer.Option("--ledgerId", "-l", min=0, help="The ledger of the message.")]
EntryId = Annotated[int, typer.Option("--entryId", "-e", min=0, help="Its entry.")]
DeliverAt = Annotated[int, typer.Option("--deliver-at", min=0, help="The new time, in milliseconds since 1970.")]


class _PulsarAdminGroup(CommandGroup):
    """A group of commands that reports failures as `pulsar-admin` does, with its exit status 1."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with _told_as_pulsar_admin():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with _told_as_pulsar_admin():
            return super().invoke(ctx)


@contextmanager
def _told_as_pulsar_admin() -> Iterator[None]:
    try:
        yield
    except AdminError as error:
        _complain(str(error))
    except _ClickError as error:
        _complain(_usage_error(error))


def _usage_error(error: Any) -> str:
    hint = f"\n\nsee {error.ctx.command_path} --help" if error.ctx else ""
    return f"{usage_error_text(error)}{hint}"


def _complain(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write("".join(f"{printable(line)}\n" for line in text.split("\n")))
    raise typer.Exit(1)


def _group(text: str) -> typer.Typer:
    return typer.Typer(
        cls=_PulsarAdminGroup,
        help=text,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def namespaces() -> typer.Typer:
    """Return the group `ackstate namespaces`."""
    group = _group("Delayed-delivery policies of namespaces, on the server of `ackstate serve`.")

    @group.command("get-delayed-delivery", short_help="Print the policy, null when none is set.")
    def get(context: typer.Context, namespace: Namespace) -> None:
        """Print the policy of a namespace as JSON, null when none is set."""
        console.write(_pretty(_server(context).call("GET", namespace_path(namespace) + _RESOURCE)))

    @group.command("set-delayed-delivery", short_help="Change the given fields of the policy.")
    def set_(
        context: typer.Context,
        namespace: Namespace,
        enable: Enable = False,
        disable: Disable = False,
        time: TickTime = None,
        max_delay: MaxDelay = None,
        fixed_delay: FixedDelay = None,
    ) -> None:
        """Change the policy of a namespace; other fields keep their values."""
        path = namespace_path(namespace) + _RESOURCE
        update = _update(enable, disable, time, max_delay, fixed_delay)
        _server(context).call("POST", path, body=update)

    @group.command("remove-delayed-delivery", short_help="Remove the policy.")
    def remove(context: typer.Context, namespace: Namespace) -> None:
        """Remove the policy of a namespace."""
        _server(context).call("DELETE", namespace_path(namespace) + _RESOURCE)

    return group


def topics() -> typer.Typer:
    """Return the group `ackstate topics`."""
    group = _group("Delayed-delivery policies of topics, on the server of `ackstate serve`.")

    @group.command("get-delayed-delivery", short_help="Print the policy, null when none is set.")
    def get(context: typer.Context, topic: Topic, applied: Applied = False, is_global: Global = False) -> None:
        """Print the policy of a topic as JSON, null when none is set."""
        query = {"applied": str(applied).lower()} | _global(is_global)
        console.write(_pretty(_server(context).call("GET", topic_path(topic) + _RESOURCE, query=query)))

    @group.command("set-delayed-delivery", short_help="Change the given fields of the policy.")
    def set_(
        context: typer.Context,
        topic: Topic,
        enable: Enable = False,
        disable: Disable = False,
        time: TickTime = None,
        max_delay: MaxDelay = None,
        fixed_delay: FixedDelay = None,
        is_global: Global = False,
    ) -> None:
        """Change the policy of a topic; other fields keep their values."""
        path = topic_path(topic) + _RESOURCE
        update = _update(enable, disable, time, max_delay, fixed_delay)
        _server(context).call("POST", path, query=_global(is_global), body=update)

    @group.command("remove-delayed-delivery", short_help="Remove the policy.")
    def remove(context: typer.Context, topic: Topic, is_global: Global = False) -> None:
        """Remove the policy of a topic."""
        _server(context).call("DELETE", topic_path(topic) + _RESOURCE, query=_global(is_global))

    @group.command("cancel-delayed-message", short_help="Take a delayed message back.")
    def cancel(context: typer.Context, topic: Topic, ledger_id: LedgerId, entry_id: EntryId) -> None:
        """Take a delayed message back before it is due, for all subscriptions of an open topic."""
        _server(context).call("DELETE", f"{topic_path(topic)}{_RESOURCE}/{ledger_id}/{entry_id}")

    @group.command("reschedule-delayed-message", short_help="Change when a delayed message is delivered.")
    def reschedule(
        context: typer.Context, topic: Topic, ledger_id: LedgerId, entry_id: EntryId, deliver_at: DeliverAt
    ) -> None:
        """Change when a delayed message is delivered, before it is due, for all subscriptions of an open topic."""
        path = f"{topic_path(topic)}{_RESOURCE}/{ledger_id}/{entry_id}"
        _server(context).call("POST", path, body=deliver_at)

    return group


def _server(context: typer.Context) -> AdminServer:
    server: AdminServer = context.obj()
    return server


def _global(is_global: bool) -> dict[str, str]:
    return {"isGlobal": "true"} if is_global else {}


def _update(
    enable: bool, disable: bool, tick_time: Duration | None, max_delay: Duration | None, fixed_delay: Duration | None
) -> dict[str, object]:
    """Return the given fields only: a default would overwrite the server's value."""
    if enable == disable:
        raise AdminError("Need to specify either --enable or --disable\n")
    times = {
        "tickTime": tick_time,
        "maxDeliveryDelayInMillis": max_delay,
        "fixedDeliveryDelayInMillis": fixed_delay,
    }
    return {"active": enable} | {name: time.ms for name, time in times.items() if time is not None}


def _pretty(answer: Any) -> str:
    """Return JSON laid out as Jackson does."""
    return json.dumps(answer, indent=2, separators=(",", " : ")) + "\n"
