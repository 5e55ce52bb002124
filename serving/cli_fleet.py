"""``polyslo tiers`` and ``polyslo fleet``: who serves what, why, and changing it."""

from typing import Annotated, Any

import typer

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_ADDRESS = "http://127.0.0.1:8265"

Url = Annotated[str, typer.Option("--url", help="Where the server answers.", envvar="POLYSLO_URL")]
Address = Annotated[
    str, typer.Option("--address", help="Dashboard of the Ray cluster.", envvar="RAY_DASHBOARD_ADDRESS")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the server's JSON as it is.")]

tiers = typer.Typer(invoke_without_command=True, help="Show the tiers, or change one in place.", rich_markup_mode=None)


@tiers.callback()
def show_tiers(context: typer.Context, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show the tiers: objectives, bounds, replicas, demand, outcomes; or change one in place."""
    if context.invoked_subcommand is None:
        from serving import cli_status, fleet_tables

        fleet_tables.show_tiers(cli_status.fetch(url), as_json)


@tiers.command("set")
def set_tier(
    name: Annotated[str, typer.Argument(help="The tier; one of a new name is added.")],
    settings: Annotated[list[str], typer.Argument(help="KEY=VALUE as in the tier table; KEY= takes a key away.")],
    url: Url = DEFAULT_URL,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Change or add a tier: min_replicas=2 max_replicas=6 tpot_ms=40."""
    from serving import tier_edit

    wanted = tier_edit.read_settings(settings)
    _apply(url, tier_edit.redeploy(address, lambda table: tier_edit.set_tier(table, name, wanted)))


@tiers.command("remove")
def remove_tier(
    name: Annotated[str, typer.Argument(help="The tier.")], url: Url = DEFAULT_URL, address: Address = DEFAULT_ADDRESS
) -> None:
    """Remove a tier; its requests and replicas move to the next tighter one."""
    from serving import tier_edit

    _apply(url, tier_edit.redeploy(address, lambda table: tier_edit.remove_tier(table, name)))


def _apply(url: str, table: dict[str, Any]) -> None:
    from serving import tier_edit

    tier_edit.wait_applied(url, table["version"])
    print(f"Tier table version {table['version']} is in force. A Serve file deployed later must state a higher one.")


def fleet(
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
    history: Annotated[int, typer.Option(min=0, help="So many of the latest changes.")] = 15,
) -> None:
    """Show replicas, their roles and load, the fleet's size, and what changed why."""
    from serving import cli_status, fleet_tables

    fleet_tables.show_fleet(cli_status.fetch(url), history, as_json)
