"""The settings that a run saves in ``WORKDIR/evernear.toml``, their readers, and their
precedence."""

import os
from pathlib import Path
from typing import Any

import pytest

from evernear import settings
from evernear.common import masking
from evernear.errors import SettingsError
from evernear.settings import Settings
from evernear.settings.layers import FILE, Layers


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that does not exist yet, below the current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "work"


def layers(work: Path, *overrides: str, **sources: Any) -> Layers[Settings]:
    return settings.load_layers(overrides=[f"workdir={work}", *overrides], **{"environment": {}, **sources})


def write(work: Path, text: str | bytes) -> None:
    work.mkdir(exist_ok=True)
    (work / FILE).write_bytes(text if isinstance(text, bytes) else text.encode())


def test_later_commands_have_the_settings_of_the_first_run(work: Path) -> None:
    config = work.with_name("config.toml")
    config.write_text('[permissions]\nstart = ["U1"]\n[data.split_folders]\nold = "test"\n')
    words = ("data.source=folder:images", "target=registry", "train.learning_rate=0.001", "index.uri=gallery.db")
    first = layers(work, *words, preset="quick", config=config, environment={"EVERNEAR_TRAIN__SEED": "5"})
    assert first.later_words(keep=True) == ["--workdir", str(work)]
    (lines,) = first.keep(replace=False)
    assert lines.startswith(f"Kept in {work / FILE} for later commands: preset, target, data.source, ")

    later = layers(work)
    assert not list(later.changes())
    loaded = later.settings()
    images = f"folder:{work.parent}/images"
    assert (loaded.data.source, loaded.target, loaded.train.learning_rate) == (images, "registry", 0.001)
    assert (loaded.permissions.start, loaded.data.split_folders) == (("U1",), {"old": "test"})
    assert loaded.index.uri == f"{work.parent}/gallery.db"
    assert loaded.train.epochs == settings.load(preset="quick", environment={}).train.epochs
    assert loaded.train.seed == 0, "the environment is never kept"
    assert (work / FILE).read_text().startswith("# Settings of this working directory")


def test_share_of_left_out_files_is_accepted_for_one_run(work: Path) -> None:
    words = ("target=registry", "validation.max_left_out_fraction=0.7", "validation.min_class_images=3")
    first = layers(work, *words)
    assert first.later_words(keep=True)[-2:] == ["--set", "validation.max_left_out_fraction=0.7"]
    kept, alone = first.keep(replace=True)
    assert "validation.min_class_images" in kept
    assert "max_left_out_fraction" not in kept
    assert alone.startswith("validation.max_left_out_fraction=0.7 is for this run alone")
    later = layers(work).settings().validation
    assert (later.min_class_images, later.max_left_out_fraction) == (3, 0.02)

    write(work, "[validation]\nmax_left_out_fraction = 0.1\n")
    assert layers(work).settings().validation.max_left_out_fraction == 0.1, "what a user wrote into the file counts"
    assert not layers(work, "target=registry").keep(replace=True)[1:]


def test_order_of_the_sources(work: Path) -> None:
    config = work.with_name("config.toml")
    config.write_text("[train]\nmargin = 0.4\nseed = 4\nepochs = 4\n")
    write(work, 'preset = "quick"\n[train]\nmin_steps = 3\nmargin = 0.3\nseed = 3\nepochs = 3\n')
    environment = {"EVERNEAR_TRAIN__SEED": "5", "EVERNEAR_TRAIN__EPOCHS": "5"}
    train = layers(work, "train.epochs=6", config=config, environment=environment).settings().train
    quick = settings.load(preset="quick", environment={}).train
    assert (train.width, train.min_steps, train.margin, train.seed, train.epochs) == (quick.width, 3, 0.4, 5, 6)
    assert quick.min_steps != 3


def test_environment_and_config_select_the_directory(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(work, 'target = "registry"\n')
    config = work.with_name("config.toml")
    config.write_text(f'workdir = "{work}"\n')
    assert settings.load(environment={"EVERNEAR_WORKDIR": str(work)}).target == "registry"
    assert settings.load(environment={}, config=config).target == "registry"
    assert settings.load(environment={"EVERNEAR_WORKDIR": str(work)}, overrides=["workdir=other"]).target == "local"
    link = work.with_name("link")
    link.symlink_to(work)
    assert layers(link).settings().target == "registry"
    work.rename(work.with_name("evernear-work"))
    assert settings.load(environment={}).target == "registry", "the default directory, which was moved here"
    assert settings.load(environment={}, remembered=False).target == "local"


def test_another_value_is_for_one_run_and_is_shown(work: Path) -> None:
    write(work, '# mine\npreset = "quick"\n[train]\nepochs = 5\n')
    other = layers(work, "train.epochs=3", "gate.beat_baseline=false", preset="quick")
    assert list(other.changes()) == ["train.epochs: 5 -> 3", "gate.beat_baseline: true -> false"]
    once = ["--set", "train.epochs=3", "--set", "gate.beat_baseline=false"]
    assert other.later_words(keep=False) == ["--workdir", str(work), *once]
    assert other.keep(replace=False) == []
    assert layers(work).settings().train.epochs == 5

    assert other.keep(replace=True) == [
        f"Kept in {work / FILE} for later commands: preset, train.epochs, gate.beat_baseline."
    ]
    assert (work / FILE).read_text() == (
        '# mine\npreset = "quick"\n[train]\nepochs = 3\n\n[gate]\nbeat_baseline = false\n'
    )
    assert not list(layers(work, "train.epochs=3", "gate.beat_baseline=false").changes())


def test_preset_of_the_command_line_replaces_the_remembered_one(work: Path) -> None:
    write(work, 'preset = "quick"\n[train]\nepochs = 5\n')
    other = layers(work, preset="best")
    best = settings.load(preset="best", environment={}).train
    assert list(other.changes()) == [
        "preset: quick -> best",
        f"train.epochs: stays 5; preset best has {best.epochs}",
    ]
    assert (other.settings().train.epochs, other.settings().train.members) == (5, best.members)
    assert other.later_words(keep=False) == ["--workdir", str(work), "--preset", "best"]
    other.keep(replace=True)
    assert layers(work).settings().train.members == best.members


def test_first_run_without_settings_also_leaves_a_file(work: Path) -> None:
    """The options of the second run, such as a looser gate, are then for that run only."""
    assert layers(work).keep(replace=False) == []
    layers(work, "gate.beat_baseline=false").keep(replace=False)
    assert layers(work).settings().gate.beat_baseline


def test_secret_of_the_environment_is_neither_kept_nor_shown(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_forms", masking.forms_of(["hunter2-hunter2"]))
    secret = layers(work, "data.source=s3://bucket/hunter2-hunter2", "target=registry")
    lines = secret.keep(replace=False)
    assert lines[1].startswith(f"data.source contains a secret and is not kept in {work / FILE}: ")
    shown = "\n".join([(work / FILE).read_text(), *secret.changes(), *secret.later_words(keep=False), *lines])
    assert "hunter2" not in shown
    assert "data.source: " in shown
    assert "s3://bucket/***" in shown


@pytest.mark.parametrize(
    ("setting", "masked"),
    [
        ("store=s3://ada:hunter2/2@bucket/p", "s3://***@bucket/p"),
        ("data.source=s3://bucket/p?X-Amz-Signature=hunter2&x=1", "s3://bucket/p?X-Amz-Signature=***&x=1"),
        ("train.weights=s3://ada:hunter2@bucket/w", "s3://***@bucket/w"),
        ("index.uri=http://ada:hunter2@milvus:19530", "http://***@milvus:19530"),
        ("pipeline.endpoint=http://ada:hunter2@kfp.example", "http://***@kfp.example"),
        ("pipeline.ui_url=http://kfp?api_key=hunter2", "http://kfp?api_key=***"),
        ("slack.channel=xoxb-1234567890-hunter2", "***"),
        ('permissions.start=["U1", "xoxb-1234567890-hunter2"]', "['U1', '***']"),
    ],
)
def test_secret_in_a_setting_is_refused(work: Path, setting: str, masked: str) -> None:
    name = setting.partition("=")[0]
    with pytest.raises(SettingsError) as caught:
        layers(work, setting).settings()
    assert str(caught.value).startswith(f"Setting {name}")
    assert f" = {masked} contains a secret" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "AWS_SECRET_ACCESS_KEY" in str(caught.value)


def test_secret_in_a_settings_file_is_refused_with_its_name(work: Path) -> None:
    work.mkdir()
    (work / FILE).write_text('store = "s3://ada:hunter2@bucket/p"\n')
    with pytest.raises(SettingsError, match=rf"^{work / FILE}: Setting store = s3://\*\*\*@bucket/p contains a secret"):
        layers(work).settings()


@pytest.mark.parametrize(
    "setting",
    [
        *("data.source=s3://bucket/a@b", "kubernetes.image=train:v1@sha256:" + 64 * "a"),
        *("pipeline.ui_url=http://kfp:8443/?ns=ada@example.com", "kubernetes.token_secret=evernear-token"),
        "pipeline.endpoint=http://[::1]:8080/u@x",
    ],
)
def test_ordinary_addresses_are_kept(work: Path, setting: str) -> None:
    layers(work, setting).keep(replace=False)
    assert setting.partition("=")[2] in (work / FILE).read_text()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[train]\nepoch = 3\n", "{file}: No setting 'train.epoch'; did you mean 'train.epochs'?"),
        ("[train]\nepochs = 'many'\n", "{file}: Invalid setting train.epochs = many: "),
        ("preset = 'qick'\n", "{file}: No preset 'qick'; known: "),
        ("train = 3\n", "{file}: train = 3 is not a section; write [train] and its settings below."),
        ("[train\nepochs = 3\n", "(at line 1, column 7). Correct it, or delete it to forget its settings."),
        (b"\x80", "{file} is not TOML: "),
        ("workdir = '/elsewhere'\n", "{file}: workdir = /elsewhere is another directory; remove that line."),
    ],
)
def test_damaged_file_is_named_with_the_key_and_a_remedy(work: Path, content: str | bytes, sentence: str) -> None:
    write(work, content)
    for overrides in ((), ("train.width=8",)):
        with pytest.raises(SettingsError) as caught:
            layers(work, *overrides).settings()
        assert sentence.format(file=work / FILE) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_fault_of_the_command_line_does_not_blame_the_file(work: Path) -> None:
    write(work, "[train]\nembedding_dim = 384\n")
    for override in ("train.epoch=3", "train.members=5"):
        with pytest.raises(SettingsError) as caught:
            layers(work, override).settings()
        assert FILE not in str(caught.value)
    config = work.with_name("config.toml")
    config.write_text("[train]\nepoch = 3\n")
    with pytest.raises(SettingsError, match=r"config\.toml: No setting 'train\.epoch'"):
        layers(work, config=config).settings()


def test_unreadable_file_is_an_error(work: Path) -> None:
    (work / FILE).mkdir(parents=True)
    with pytest.raises(SettingsError, match=rf"Cannot read the settings file .*{FILE}: Is a directory\. Remove it\.$"):
        layers(work).settings()
    (work / FILE).rmdir()
    (work / FILE).symlink_to("nowhere")
    with pytest.raises(SettingsError, match=r"No such file or directory\. Remove it\.$"):
        layers(work).settings()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_file_without_permission_is_an_error(work: Path) -> None:
    write(work, "")
    (work / FILE).chmod(0)
    with pytest.raises(
        SettingsError, match=rf"Cannot read the settings file .*{FILE}: Permission denied\. Make it readable"
    ):
        layers(work).settings()


def test_file_of_a_person_is_respected(work: Path) -> None:
    """Its relative paths start at the directory, so that it can be moved and used from anywhere."""
    write(work, 'workdir = "."\n[data]\nsource = "folder:images"  # here\n[train]\nweights = "resnet.safetensors"\n')
    text = (work / FILE).read_text()
    loaded = layers(work, "target=registry")
    assert loaded.settings().data.source == f"folder:{work}/images"
    assert loaded.settings().train.weights == f"{work}/resnet.safetensors"
    assert list(loaded.changes()) == ["target: local -> registry"]
    assert loaded.keep(replace=False) == []
    assert (work / FILE).read_text() == text
    loaded.keep(replace=True)
    assert 'source = "folder:images"  # here\n' in (work / FILE).read_text()
    assert layers(work).settings().target == "registry"


def test_file_that_appears_during_the_first_run_is_not_overwritten(work: Path) -> None:
    first = layers(work, "target=registry")
    write(work, "# mine\n")
    assert first.keep(replace=False) == []
    assert (work / FILE).read_text() == "# mine\n"


def test_linked_file_stays_a_link(work: Path) -> None:
    write(work, "")
    shared = work.with_name("shared.toml")
    (work / FILE).rename(shared)
    (work / FILE).symlink_to(shared)
    layers(work, "target=registry").keep(replace=True)
    assert (work / FILE).is_symlink()
    assert shared.read_text() == 'target = "registry"\n'


def test_file_of_a_windows_editor_can_be_kept_up_to_date(work: Path) -> None:
    write(work, "# mine\r\n".encode("utf-16"))
    layers(work, "target=registry").keep(replace=True)
    assert (work / FILE).read_text() == '# mine\ntarget = "registry"\n'
    assert layers(work).settings().target == "registry"


def test_home_directory_is_expanded(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(work.parent))
    write(work, 'target = "registry"\n[data]\nsource = "folder:~/images"\n')
    loaded = settings.load(environment={"EVERNEAR_WORKDIR": "~/work"})
    assert (loaded.workdir, loaded.target, loaded.data.source) == (work, "registry", f"folder:{work.parent}/images")
    with pytest.raises(SettingsError, match="no user has the home directory ~nobody-here"):
        settings.load(environment={"EVERNEAR_WORKDIR": "~nobody-here/work"})


def test_run_goes_on_if_the_file_cannot_be_written(work: Path) -> None:
    work.write_text("a file, not a directory")
    (lines,) = layers(work, "target=registry").keep(replace=False)
    assert lines.startswith(f"WARNING: {work / FILE} cannot be read or written: File exists. ")


def test_settings_that_need_those_of_the_environment_are_kept(work: Path) -> None:
    environment = {"EVERNEAR_TRAIN__EMBEDDING_DIM": "129"}
    layers(work, "train.members=3", environment=environment).keep(replace=False)
    assert "embedding_dim" not in (work / FILE).read_text()
    assert layers(work, environment=environment).settings().train.members == 3
