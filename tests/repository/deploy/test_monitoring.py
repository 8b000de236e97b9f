"""Dashboard and alerts query series and labels that the servers export, and fire when they
should.

The tests with promtool run where it is on the PATH.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from evernear.serving.http.telemetry import Telemetry
from evernear.serving.metrics import metrics_file
from evernear.triggers.watch.watcher import FIGURES
from tests.repository.deploy.rendered import DEPLOY, named, objects

UNIT_TESTS = [Path(__file__).with_name(name) for name in ("alerts_test.yaml", "alerts_week_test.yaml")]
DASHBOARD = json.loads((DEPLOY / "components/monitoring/dashboard.json").read_text())
PANELS = DASHBOARD["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]] + [
    annotation["expr"] for annotation in DASHBOARD["annotations"]["list"]
]
SCRAPED = {"namespace"}  # added by a ServiceMonitor
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",), "info": ("_info",)}


def exported_labels() -> dict[str, set[str]]:
    """Labels by series, of TorchServe with evernear's handler, of the preprocessing server and of
    the watcher."""
    series = {
        entry["name"]: set(entry["dimensions"])
        for kinds in metrics_file().values()
        for entries in kinds.values()
        for entry in entries
    }
    registry = Telemetry("prep", "embedding").registry
    for family in registry.collect():
        labels = set(registry._names_to_collectors[family.name]._labelnames)
        series |= {family.name + suffix: labels | {"le"} for suffix in SUFFIXES[family.type]}
    return series | {f"evernear_{figure}": {"version"} for figure in FIGURES}


def alerts() -> dict[str, str]:
    (rule,) = named(objects("production"), "PrometheusRule").values()
    return {alert["alert"]: alert["expr"] for group in rule["spec"]["groups"] for alert in group["rules"]}


def parse_query(query: str) -> tuple[dict[str, set[str]], set[str]]:
    """Series of a query with the labels that select them, and the labels that it groups by."""
    grouped = {
        label.strip()
        for labels in re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", query)
        for label in labels.split(",")
        if label.strip()
    }
    plain = re.sub(r"\b(?:by|on|without)\s*\([^)]*\)|\[\w+\]|\boffset \w+", " ", query)
    series: dict[str, set[str]] = {}
    for name, selector in re.findall(r"([A-Za-z_]\w*)\s*(?:\{([^}]*)\})", plain):
        series.setdefault(name, set()).update(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
    bare = re.sub(r"[A-Za-z_]\w*\s*\{[^}]*\}", " ", plain)
    words = set(re.findall(r"\b[A-Za-z_]\w*\b(?!\s*\()", bare)) - {"unless", "group_left", "and", "or"}
    assert not words, f"every series needs a namespace selector: {words} in {query}"
    return series, grouped


def test_queries_use_exported_series_and_labels() -> None:
    labels = exported_labels()
    for query in [*QUERIES, *alerts().values()]:
        series, grouped = parse_query(query)
        assert series, query
        for name, selected in series.items():
            assert name in labels, f"no server exports {name}"
            assert "namespace" in selected, query
            assert selected <= labels[name] | SCRAPED, query
        assert grouped <= set().union(*(labels[name] for name in series)), query


def test_dashboard_is_labeled_for_grafana_and_uses_the_chosen_datasource() -> None:
    config_map = named(objects("production"), "ConfigMap")["evernear-dashboard"]
    assert json.loads(config_map["data"]["dashboard.json"]) == DASHBOARD
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "namespace"}
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in PANELS)


def promtool(directory: Path, *arguments: str) -> str:
    """The output of promtool, which must accept the files in ``directory``."""
    binary = shutil.which("promtool")
    if binary is None:
        pytest.skip("promtool is not on the PATH; it comes with Prometheus")
    done = subprocess.run([binary, *arguments], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_alerts_pass_their_unit_tests(tmp_path: Path) -> None:
    (rule,) = named(objects("production"), "PrometheusRule").values()
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    for path in UNIT_TESTS:
        shutil.copy(path, tmp_path)
    assert "SUCCESS" in promtool(tmp_path, "check", "rules", "--lint-fatal", "rules.yaml")
    assert "SUCCESS" in promtool(tmp_path, "test", "rules", *(path.name for path in UNIT_TESTS))


def test_every_alert_has_a_unit_test() -> None:
    tests = "".join(path.read_text() for path in UNIT_TESTS)
    assert not [name for name in alerts() if f'alertname="{name}", alertstate="firing"' not in tests]


def test_queries_of_the_dashboard_are_valid(tmp_path: Path) -> None:
    queries = [query.replace("$namespace", "evernear") for query in QUERIES]
    rules = [{"record": f"panel:query:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"SUCCESS: {len(rules)} rules found" in promtool(tmp_path, "check", "rules", "rules.yaml")


def test_agreement_and_drift_of_live_queries_are_computed_from_the_series(tmp_path: Path) -> None:
    """60% of the live distances are within 0.1 and all within 0.2; of the reference, 90% and
    100%."""
    panels = {panel["title"]: panel["targets"][0]["expr"].replace("$namespace", "evernear") for panel in PANELS}
    rules = {"agreement": panels["Agreement of neighbors"], "drift": panels["Drift of distances"]}
    series = {
        'distance_bucket{le="0.1"': "0+6x600",
        'distance_bucket{le="0.2"': "0+10x600",
        'distance_bucket{le="+Inf"': "0+10x600",
        "distance_count{": "0+10x600",
        'reference_distance_ratio{le="0.1"': "0.9x600",
        'reference_distance_ratio{le="0.2"': "1x600",
        'neighbors_total{agrees="true"': "0+40x600",
        'neighbors_total{agrees="false"': "0+10x600",
    }
    labels = 'version="v",namespace="evernear"'
    test = {
        "interval": "1m",
        "input_series": [
            {"series": f"evernear_{name}{'' if name.endswith('{') else ','}{labels}}}", "values": values}
            for name, values in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": f"round({name}, 0.01)",
                "eval_time": "8h",
                "exp_samples": [{"labels": '{version="v"}', "value": value}],
            }
            for name, value in (("agreement", 0.8), ("drift", 0.3))
        ],
    }
    recorded = [{"record": name, "expr": expression} for name, expression in rules.items()]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [test]}))
    assert "SUCCESS" in promtool(tmp_path, "test", "rules", "test.yaml")
