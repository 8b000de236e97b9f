"""Settings: precedence, and suggestions for unknown keys."""

from pathlib import Path

import pytest

from evernear import settings
from evernear.errors import SettingsError
from evernear.settings.sources import presets


def load(**arguments: object) -> settings.Settings:
    return settings.load(**{"environment": {}, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.epoch=3", "No setting 'train.epoch'; did you mean 'train.epochs'?"),
        ("epochs=3", "No setting 'epochs'; did you mean 'train.epochs'?"),
        ("qqq=3", "No setting 'qqq'; remove it, or correct its name."),
        ("gaet.significance=0.1", "No setting 'gaet.significance'; did you mean 'gate.significance'?"),
        ("train.epochs=many", "Invalid setting train.epochs = many: "),
        (
            "prep.predictor_host=http://x",
            "Invalid setting prep.predictor_host = http://x: it is not a host name; leave",
        ),
        ("serving.host=localhost:80", "Invalid setting serving.host = localhost:80: it is not a host name;"),
        ("console.certificate=c.pem", "Invalid setting console: certificate and private_key belong together;"),
        ("train.epochs=-1", "Invalid setting train.epochs = -1: "),
        ("kubernetes.cpu=two", "two: it does not match ^[0-9]+(\\.[0-9]+|m)?$ (CPU request and limit of a pod)."),
        ("kubernetes.image=serve:latest", "(Serving image by digest, REF@sha256:...)."),
        ("slack.api_url=slack.com", "slack.api_url = slack.com: it is not of the form https://host:port/path."),
        ("train.epochs", "has no '='"),
        (
            "train=3",
            "Invalid setting train = 3: it is a section; write its settings as section.key=value.",
        ),
        ("permissions.start=U1", 'Invalid setting permissions.start = U1: it is a list, as in ["a", "b"].'),
        ("data.split_folders=a=b", 'it is a table, as in {"key": "value"}.'),
    ],
)
def test_typo_is_reported_with_a_suggestion(override: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as exc_info:
        load(overrides=[override])
    assert sentence in str(exc_info.value)
    assert "\n" not in str(exc_info.value)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (['validation.off=["imbalanc"]'], r"validation\.off\.0 = imbalanc: .* did you mean 'imbalance'\?$"),
        (
            ['validation.off=["imbalance"]', 'validation.warn=["pixels", "imbalance"]'],
            "the rule imbalance is in the lists warn and off; keep it in one of them",
        ),
        (['validation.off=["clipped"]'], "clipped is part of the rule pixels; name that one"),
        (['validation.warn=["letterboxed"]'], "letterboxed is part of the rule resized; name that one"),
        (['validation.error=["hidden_folder"]'], "hidden_folder is part of the rule left_out; name that one"),
        (["validation.off=imbalance"], r'validation\.off = imbalance: it is a list, as in \["a", "b"\]'),
    ],
)
def test_lists_of_validation_rules_name_each_known_rule_once(overrides: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        load(overrides=overrides)
    chosen = load(overrides=['validation.off=["imbalance"]']).validation.severities()
    assert (chosen["imbalance"], chosen["pixels"], chosen["left_out"]) == ("off", "warn", "warn")


def test_unknown_environment_variable_is_an_error() -> None:
    with pytest.raises(SettingsError, match=r"did you mean 'serving.workers'"):
        load(environment={"EVERNEAR_SERVING__WORKER": "2"})


@pytest.mark.parametrize(("content", "sentence"), [("epochs = = 1", "is not TOML"), ("\xff", "is not TOML")])
def test_unreadable_file(tmp_path: Path, content: str, sentence: str) -> None:
    config = tmp_path / "broken.toml"
    config.write_bytes(content.encode("latin-1"))
    with pytest.raises(SettingsError, match=sentence):
        load(config=config)
    with pytest.raises(SettingsError, match="Cannot read the settings file"):
        load(config=tmp_path / "absent.toml")


def test_every_preset_loads() -> None:
    assert {"best", "quick"} <= set(presets())
    for name in presets():
        load(preset=name)
    with pytest.raises(SettingsError, match=r"known: best, default, fast, frozen, photos, quick"):
        load(preset="bset")


def test_sections_survive_a_round_trip_through_kfp() -> None:
    """KFP passes numbers as floats; whole numbers are converted to integers."""
    section = load().train
    as_kfp = {
        k: float(v) if isinstance(v, int) and not isinstance(v, bool) else v for k, v in section.model_dump().items()
    }
    assert settings.parse(settings.TrainSettings, as_kfp) == section


def test_run_settings_combine_defaults_preset_overrides_and_parameters() -> None:
    image = "registry.example/serve@sha256:" + 64 * "a"
    chosen = settings.of_run(
        {"train": {"epochs": 3}, "kubernetes": {"replicas_min": 1}},
        preset="best",
        source="s3://images",
        target="kubernetes",
        serving_image=image,
        store="s3://ours",
    )
    assert (chosen.train.epochs, chosen.train.members) == (3, load(preset="best").train.members)
    assert (chosen.data.source, chosen.target, chosen.store_uri) == ("s3://images", "kubernetes", "s3://ours")
    assert (chosen.kubernetes.image, chosen.kubernetes.replicas_min) == (image, 1)
    assert settings.of_run({"data": {"source": "mnist"}}, source="").data.source == "mnist", "empty changes nothing"
    assert settings.of_run({"data": {"source": "mnist"}}, source="mnist").data.source == "mnist"


@pytest.mark.parametrize(
    ("overrides", "parameters", "sentence"),
    [
        ({"data": {"source": "mnist"}}, {"source": "digits"}, "data.source is set twice, to 'digits' by the parameter"),
        ({"target": "local"}, {"target": "registry"}, "target is set twice"),
        ({"train": {"epoch": 3}}, {}, "No setting 'train.epoch'; did you mean 'train.epochs'?"),
        ({"slack": {"channel": "C0"}}, {}, "No setting 'slack'"),
        ({"moved_from": "s3://ada:hunter2@old"}, {}, r"Setting moved_from = s3://\*\*\*@old contains a secret"),
        ({}, {"preset": "bset"}, "No preset 'bset'"),
        ({}, {"target": "moon"}, "Invalid setting target = moon: "),
    ],
)
def test_invalid_run_parameters_are_reported(
    overrides: dict[str, object], parameters: dict[str, str], sentence: str
) -> None:
    with pytest.raises(SettingsError, match=sentence) as error:
        settings.of_run(overrides, **parameters)
    assert "\n" not in str(error.value)


def test_workdir_determines_the_store(tmp_path: Path) -> None:
    assert load(overrides=[f"workdir={tmp_path}"]).store_uri == (tmp_path / "store").as_uri()
    assert load(overrides=["store=s3://bucket/x"]).store_uri == "s3://bucket/x"


def test_relative_source_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in ("folder", "mnist"):
        assert load(overrides=[f"data.source={kind}:images/"]).data.source == f"{kind}:{tmp_path}/images"
        assert load(overrides=[f"data.source={kind}:/images"]).data.source == f"{kind}:/images"
    for source in ("mnist", "digits", "s3://bucket/prefix", "folder:"):
        assert load(overrides=[f"data.source={source}"]).data.source == source


def test_directory_without_kind_suggests_a_folder_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("small", "digits"):
        Path(name).mkdir()
    with pytest.raises(SettingsError, match=r"'small' is a directory; use folder:small for the images in it"):
        load(overrides=["data.source=small"])
    assert load(overrides=["data.source=digits"]).data.source == "digits", "a built-in source takes precedence"
    assert load(overrides=["data.source=smal"]).data.source == "smal", "open_source lists the known sources"


def test_source_that_is_not_utf8_is_refused_in_a_sentence(tmp_path: Path) -> None:
    directory = tmp_path / "src\udce9"
    directory.mkdir()
    for source in (f"folder:{directory}", str(directory), "s3://bucket/src\udce9"):
        with pytest.raises(SettingsError, match=r"^Invalid setting data\.source = .*: it is not UTF-8; rename it\.$"):
            load(overrides=[f"data.source={source}"])


def service_links(service: str, port: int, protocol: str, port_name: str) -> dict[str, str]:
    """The variables that a kubelet sets for a Service (kubernetes/pkg/kubelet/envvars)."""
    name, upper = service.upper().replace("-", "_"), protocol.upper()
    address = f"{protocol}://10.96.0.7:{port}"
    return {
        f"{name}_SERVICE_HOST": "10.96.0.7",
        f"{name}_SERVICE_PORT": str(port),
        f"{name}_SERVICE_PORT_{port_name.upper().replace('-', '_')}": str(port),
        f"{name}_PORT": address,
        f"{name}_PORT_{port}_{upper}": address,
        f"{name}_PORT_{port}_{upper}_PROTO": protocol,
        f"{name}_PORT_{port}_{upper}_PORT": str(port),
        f"{name}_PORT_{port}_{upper}_ADDR": "10.96.0.7",
    }


@pytest.mark.parametrize(
    ("service", "port", "protocol", "port_name"),
    [
        ("evernear-x7k2p-tpe", 6789, "tcp", "katib-api"),
        ("evernear-prep", 8090, "tcp", "http"),  # the same name as the setting prep.port
        ("evernear", 53, "udp", "dns"),
        ("evernear-serving", 8080, "sctp", "http-inference"),
        ("evernear-milvus", 19530, "tcp", "token"),
    ],
)
def test_variables_of_services_are_ignored(service: str, port: int, protocol: str, port_name: str) -> None:
    links = service_links(service, port, protocol, port_name)
    assert load(environment=links | {"EVERNEAR_PREP__PORT": "8091"}) == load(overrides=["prep.port=8091"])


@pytest.mark.parametrize(
    "name",
    [
        "EVERNEAR_EPOCHS", "EVERNEAR_PREP_PORT", "EVERNEAR_SERVING_INFERENCE_PORT", "EVERNEAR_PREP__SERVICE_HOST",
        "EVERNEAR_X_PORT_80_HTTP", "EVERNEAR_X_PORT_TCP", "EVERNEAR_X_SERVICE", "EVERNEAR_X_PORT_80_TCP_NAME",
        "EVERNEAR_X__PORT", "EVERNEAR_SERVICEHOST", "EVERNEAR_PORTS", "EVERNEAR_",
    ],
)  # fmt: skip
def test_other_variables_with_our_prefix_are_typos(name: str) -> None:
    with pytest.raises(SettingsError, match=r"^No setting '"):
        load(environment={name: "80"})


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_settings_file_of_any_editor_is_read(tmp_path: Path, encoding: str) -> None:
    config = tmp_path / "settings.toml"
    config.write_bytes('[data]\nsource = "folder:/b\u00e4r"\n'.encode(encoding))
    assert load(config=config, environment={}).data.source == "folder:/b\u00e4r"


def test_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "settings.toml").write_text("keep_runs = 7\n")
    chosen = ["data.source=folder:~/images", "workdir=~/work", "train.weights=~/w.pth", "pipeline.ca_file=~/ca.pem"]
    settings = load(config=Path("~/settings.toml"), environment={}, overrides=chosen)
    assert settings.keep_runs == 7
    assert settings.data.source == f"folder:{tmp_path}/images"
    assert (settings.workdir, settings.pipeline.ca_file) == (tmp_path / "work", tmp_path / "ca.pem")
    assert settings.train.weights == f"{tmp_path}/w.pth"
    assert load(environment={}, overrides=["data.source=mnist:~"]).data.source == f"mnist:{tmp_path}"
    assert load(environment={}, overrides=["data.source=folder:/a~b/~"]).data.source == "folder:/a~b/~"
    with pytest.raises(SettingsError, match="no user has the home directory ~nobody-has-this-name"):
        load(environment={}, overrides=["data.source=folder:~nobody-has-this-name/images"])
