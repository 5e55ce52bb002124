"""``polyslo tiers`` and ``polyslo fleet``: who serves what, why, and changing it."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from serving.launch.running import dashboard_or, url_or
from serving.launch.status import fetch

URL_HELP = "Where the server answers; without it, what was started last on this machine, else port 8000."
ADDRESS_HELP = "Dashboard of the Ray cluster; without it, that of the server on this machine, else port 8265."

Url = Annotated[str | None, typer.Option("--url", help=URL_HELP, envvar="POLYSLO_URL")]
Address = Annotated[str | None, typer.Option("--address", help=ADDRESS_HELP, envvar="RAY_DASHBOARD_ADDRESS")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]

tiers = typer.Typer(invoke_without_command=True, help="Show the tiers, or change one in place.", rich_markup_mode=None)


@tiers.callback()
def show_tiers(context: typer.Context, url: Url = None, as_json: AsJson = False) -> None:
    """Show the tiers: objectives, bounds, replicas, demand, outcomes; or change one in place."""
    if context.invoked_subcommand is not None:
        _check_heeded(context)
        return
    from serving.cli import fleet_tables

    fleet_tables.show_tiers(fetch(url_or(url)), as_json)


@tiers.command("set")
def set_tier(
    name: Annotated[str, typer.Argument(help="The tier; one of a new name is added.")],
    settings: Annotated[list[str], typer.Argument(help="KEY=VALUE as in the tier table; KEY= takes a key away.")],
    url: Url = None,
    address: Address = None,
) -> None:
    """Change or add a tier: min_replicas=2 max_replicas=6 tpot_ms=40."""
    from serving.launch import tier_edit

    wanted = tier_edit.read_settings(settings)
    _change(url, address, lambda table: tier_edit.set_tier(table, name, wanted))


@tiers.command("remove")
def remove_tier(
    name: Annotated[str, typer.Argument(help="The tier, or an alias of one.")], url: Url = None, address: Address = None
) -> None:
    """Remove a tier, whose requests and replicas move to the next tighter one; or an alias."""
    from serving.launch import tier_edit

    _change(url, address, lambda table: tier_edit.remove_tier(table, name))


def _change(url: str | None, address: str | None, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    from serving.launch import tier_edit

    url = url_or(url)
    table = tier_edit.redeploy(dashboard_or(address, url), change, url)
    tier_edit.wait_applied(url, table["version"])
    told = f"Version {table['version']} of the tiers and the fleet's settings is in force."
    print(f"{told} A Serve file deployed later must state a higher one.")


def _check_heeded(context: typer.Context) -> None:
    """Raise a mistake in usage for an option that stands before a command, which would not heed it."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.removeprefix('as_')}"
            raise typer.BadParameter(f"{option}: has no effect before {context.invoked_subcommand!r}")


fleet = typer.Typer(invoke_without_command=True, help="Show the fleet, or change it in place.", rich_markup_mode=None)


@fleet.command("set")
def set_fleet(
    settings: Annotated[
        list[str], typer.Argument(help="KEY=VALUE, such as routing=round_robin; KEY= goes back to that of args.")
    ],
    url: Url = None,
    address: Address = None,
) -> None:
    """Change how the fleet is run, in place: max_hops=2 autoscaling.max_replicas=8."""
    from serving.launch import tier_edit

    wanted = tier_edit.read_settings(settings)
    _change(url, address, lambda table: tier_edit.set_fleet(table, wanted))


@fleet.callback()
def show_fleet(
    context: typer.Context,
    url: Url = None,
    as_json: AsJson = False,
    history: Annotated[int, typer.Option(min=0, help="So many of the latest changes.")] = 15,
) -> None:
    """Show replicas, their roles and load, the fleet's size, and what changed why."""
    if context.invoked_subcommand is not None:
        _check_heeded(context)
        return
    from serving.cli import fleet_tables

    fleet_tables.show_fleet(fetch(url_or(url)), history, as_json)
