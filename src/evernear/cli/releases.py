"""``evernear registry``: the releases of a store, and the pointer to the one that serves."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from evernear.cli.options import ConfigOption, JsonOption, SetOption, WorkdirOption, settings_of
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
WhyOption = Annotated[str, typer.Option("--why", metavar="TEXT", help="For the history.")]


@app.command(name="list")
def list_(
    store: StoreOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
    as_json: JsonOption = False,
) -> None:
    """All releases, oldest first; the champion is marked."""
    registry = registry_of(store, config, overrides, workdir)
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
def show(
    version: VersionArgument,
    store: StoreOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
    as_json: JsonOption = False,
) -> None:
    """All that is known of a release, of a pruned one too: data, network, code, verdict, metrics, parts."""
    registry = registry_of(store, config, overrides, workdir)
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
def champion(
    store: StoreOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
    as_json: JsonOption = False,
) -> None:
    """The release that serves, and how it came to."""
    registry = registry_of(store, config, overrides, workdir)
    found = registry.champion()
    if found is None:
        raise StoreError(f"No release has been promoted in {registry.uri} yet; run `evernear run` first.")
    if as_json:
        print_json(found.promotion)
    else:
        print_line(found.version)


@app.command()
def history(
    store: StoreOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Every move of the champion's pointer, oldest first: when, what, how, by whom and why."""
    moves = list(registry_of(store, config, overrides, workdir).history())
    if as_json:
        print_json(moves)
        return
    rows = [(f"{m.since:%Y-%m-%d %H:%M:%S}", m.version, m.previous or "-", m.how, m.by, m.run, m.why) for m in moves]
    print_table(("since (UTC)", "version", "before it", "how", "by", "run", "why"), rows)


@app.command()
def promote(
    version: VersionArgument,
    why: WhyOption = "",
    force: Annotated[bool, typer.Option("--force", help="Although the verdict holds it; wants --why.")] = False,
    store: StoreOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a release the champion; a TorchServe that is up in the working directory follows, proved first."""
    from evernear.deployment import promote
    from evernear.release.registry import Cause

    _tell(
        promote(version, _settings(store, config, overrides, workdir), force=force, cause=Cause.of_this_process(why)),
        as_json,
    )


@app.command()
def rollback(
    why: WhyOption = "",
    store: StoreOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take the champion's last move back; again, the one before that."""
    from evernear.deployment import rollback
    from evernear.release.registry import Cause

    _tell(rollback(_settings(store, config, overrides, workdir), cause=Cause.of_this_process(why)), as_json)


@app.command()
def prune(
    keep: Annotated[int, typer.Option("--keep", min=1, metavar="N", help="How many of the newest stay.")],
    store: StoreOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove old releases; never the champion, its parent, or what a rollback leads to."""
    removed = registry_of(store, config, overrides, workdir).prune(keep)
    if as_json:
        print_json({"removed": removed})
    else:
        print_line(f"Removed {', '.join(removed)}." if removed else "Nothing to remove.")


def registry_of(store: StoreOption, config: ConfigOption, overrides: SetOption, workdir: WorkdirOption) -> "Registry":
    """The registry that the options of a command name."""
    from evernear.release.registry import Registry
    from evernear.store import open_store

    return Registry(open_store(_settings(store, config, overrides, workdir).store_uri))


def _settings(store: StoreOption, config: ConfigOption, overrides: SetOption, workdir: WorkdirOption) -> Settings:
    """With ``--store``, that store alone: what serves in the working directory may belong to another one."""
    flags = [f"store={store}", "target=registry"] if store else []
    return settings_of(None, config, [*(overrides or []), *flags], workdir)


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
