"""``evernear registry``: the releases of a store, and the pointer to the one that serves."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from evernear.cli.options import ConfigOption, JsonOption, SetOption, WorkdirOption, local_settings, with_options
from evernear.cli.tables import print_table
from evernear.errors import StoreError
from evernear.output import print_json, print_line
from evernear.settings import Settings

if TYPE_CHECKING:
    from evernear.deployment import Deployment
    from evernear.release.registry import Champion, Record, Registry

app = typer.Typer(
    rich_markup_mode="markdown", no_args_is_help=True, help="Releases: list, look at, promote, roll back, prune."
)
VersionArgument = Annotated[str, typer.Argument(metavar="VERSION")]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URI",
        help="This store alone, file:///path or s3://bucket/prefix; no TorchServe follows. [the settings' store]",
    ),
]
WhyOption = Annotated[str, typer.Option("--why", metavar="TEXT", help="Reason, for the history.")]


def registry_settings(
    store: StoreOption = None, config: ConfigOption = None, overrides: SetOption = None, workdir: WorkdirOption = None
) -> Settings:
    """The settings. With ``--store`` only the registry changes: the local server may belong to another store."""
    only = [f"store={store}", "target=registry"] if store else []
    return local_settings(config, [*(overrides or []), *only], workdir)


def registry_of(
    store: StoreOption = None, config: ConfigOption = None, overrides: SetOption = None, workdir: WorkdirOption = None
) -> "Registry":
    """The registry of the settings."""
    from evernear.release.registry import Registry
    from evernear.store import open_store

    return Registry(open_store(registry_settings(store, config, overrides, workdir).store_uri))


@app.command(name="list")
@with_options(registry=registry_of)
def list_(registry: "Registry", as_json: JsonOption = False) -> None:
    """All releases, oldest first; the champion is marked."""
    champion = registry.champion()
    told = [_told(registry.get(version), champion) for version in registry.list()]
    if as_json:
        print_json(told)
        return
    rows = [
        (
            release["version"],
            release["created"][:16].replace("T", " "),
            _percent(release["metrics"].get("accuracy")),
            "champion" if release["champion"] else "",
            release["parent"] or "-",
            f"{release['archive_size_bytes'] / 1e6:.1f} MB",
        )
        for release in told
    ]
    print_table(("version", "created (UTC)", "accuracy", "", "parent", "size"), rows)


@app.command()
@with_options(registry=registry_of)
def show(registry: "Registry", version: VersionArgument, as_json: JsonOption = False) -> None:
    """All that is known of a release, of a pruned one too: data, network, code, verdict, metrics, parts."""
    told: dict[str, Any] = _told(registry.get(version, include_pruned=True), registry.champion())
    told["pruned"] = version not in registry.list()
    if as_json:
        print_json(told)
        return
    verdict = told.pop("verdict")
    metrics, labels, parts = told.pop("metrics"), told.pop("labels"), told.pop("parts")
    for key, value in told.items():
        print_line(f"{key.replace('_', ' '):<20} {_word(value)}")
    print_line(f"{'labels':<20} {len(labels)}: {' '.join(labels[:20])}{' ...' * (len(labels) > 20)}")
    if verdict:
        print_line(f"{'verdict':<20} {'promote' if verdict['promote'] else 'hold'}")
        for reason in verdict["reasons"]:
            print_line(f"  - {reason}")
    print_line("metrics")
    for name, value in sorted(metrics.items()):
        print_line(f"  {name:<28} {value:g}")
    print_line("parts")
    for name, part in sorted(parts.items()):
        print_line(f"  {name:<20} {part['sha256']} {part['size_bytes']:>12,} bytes")


@app.command()
@with_options(registry=registry_of)
def champion(registry: "Registry", as_json: JsonOption = False) -> None:
    """The release that serves, and how it came to."""
    found = registry.champion()
    if found is None:
        raise StoreError(f"No release has been promoted in {registry.uri} yet; run `evernear run` first.")
    if as_json:
        print_json(found.promotion)
    else:
        print_line(found.version)


@app.command()
@with_options(registry=registry_of)
def history(registry: "Registry", as_json: JsonOption = False) -> None:
    """Every move of the champion's pointer, oldest first: when, what, how, by whom and why."""
    moves = list(registry.history())
    if as_json:
        print_json(moves)
        return
    rows = [(f"{m.since:%Y-%m-%d %H:%M:%S}", m.version, m.previous or "-", m.how, m.by, m.run, m.why) for m in moves]
    print_table(("since (UTC)", "version", "before it", "how", "by", "run", "why"), rows)


@app.command()
@with_options(settings=registry_settings)
def promote(
    settings: Settings,
    version: VersionArgument,
    why: WhyOption = "",
    force: Annotated[bool, typer.Option("--force", help="Although the verdict holds it; wants --why.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a release the champion; a TorchServe that is up in the working directory follows, proved first."""
    from evernear.deployment import promote
    from evernear.release.registry import Cause

    _tell(
        promote(version, settings, force=force, cause=Cause.of_this_process(why)),
        as_json,
    )


@app.command()
@with_options(settings=registry_settings)
def rollback(settings: Settings, why: WhyOption = "", as_json: JsonOption = False) -> None:
    """Take the champion's last move back; again, the one before that."""
    from evernear.deployment import roll_back
    from evernear.release.registry import Cause

    _tell(roll_back(settings, cause=Cause.of_this_process(why)), as_json)


@app.command()
@with_options(registry=registry_of)
def prune(
    registry: "Registry",
    keep: Annotated[int, typer.Option("--keep", min=1, metavar="N", help="How many of the newest stay.")],
    as_json: JsonOption = False,
) -> None:
    """Remove old releases; never the champion, its parent, or what a rollback leads to."""
    removed = registry.prune(keep)
    if as_json:
        print_json({"removed": removed})
    else:
        print_line(f"Removed {', '.join(removed)}." if removed else "Nothing to remove.")


def _told(record: "Record", champion: "Champion | None") -> dict[str, Any]:
    """A record as one level of names, for people and programs."""
    tree = record.model_dump(mode="json")
    manifest: dict[str, Any] = tree.pop("manifest")
    return manifest | tree | {"champion": champion is not None and champion.version == record.manifest.version}


def _tell(deployed: "Deployment", as_json: bool) -> None:
    if as_json:
        print_json(deployed)
        return
    place = f"serves at {deployed.url}" if deployed.url else "is the champion; servers take it up when they start"
    before = f" A rollback would lead to {deployed.previous}." if deployed.previous else ""
    print_line(f"Release {deployed.version} {place}.{before}")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _word(value: Any) -> str:
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case dict():
            return ", ".join(f"{key} {_word(inner)}" for key, inner in value.items())
        case list():
            return " ".join(_word(inner) for inner in value)
        case _:
            return str(value)
