"""Dashboard and alerts query series and labels that the servers export."""

import itertools
import json
import re

from rendered import DEPLOY, named, objects

from evernear.serving.metrics import metrics_file
from evernear.serving.prep.service import Metrics

DASHBOARD = json.loads((DEPLOY / "components/monitoring/dashboard.json").read_text())
PANELS = DASHBOARD["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]] + [
    annotation["expr"] for annotation in DASHBOARD["annotations"]["list"]
]
SCRAPED = {"namespace"}  # added by a ServiceMonitor
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",), "info": ("_info",)}


def exported_labels() -> dict[str, set[str]]:
    """Labels by series, of TorchServe with evernear's handler and of the preprocessing server."""
    series = {
        entry["name"]: set(entry["dimensions"])
        for kinds in metrics_file().values()
        for entries in kinds.values()
        for entry in entries
    }
    for family in Metrics().registry.collect():
        labels = set(Metrics().registry._names_to_collectors[family.name]._labelnames)
        series |= {family.name + suffix: labels | {"le"} for suffix in SUFFIXES[family.type]}
    return series


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


def test_unknown_series_is_detected() -> None:
    series, _ = parse_query('sum by (version) (rate(evernear_request_total{namespace="x"}[5m]))')
    assert not series.keys() <= exported_labels().keys()


def test_panels_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    boxes = [panel["gridPos"] for panel in PANELS]
    assert all(box["x"] + box["w"] <= 24 for box in boxes)
    for first, second in itertools.combinations(boxes, 2):
        beside = first["x"] + first["w"] <= second["x"] or second["x"] + second["w"] <= first["x"]
        below = first["y"] + first["h"] <= second["y"] or second["y"] + second["h"] <= first["y"]
        assert beside or below, (first, second)


def test_dashboard_is_labeled_for_grafana_and_uses_the_chosen_datasource() -> None:
    config_map = named(objects("production"), "ConfigMap")["evernear-dashboard"]
    assert json.loads(config_map["data"]["dashboard.json"]) == DASHBOARD
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "namespace"}
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in PANELS)


def test_alerts_have_severity_summary_and_description() -> None:
    (rule,) = named(objects("production"), "PrometheusRule").values()
    for group in rule["spec"]["groups"]:
        for alert in group["rules"]:
            assert alert["labels"]["severity"] in ("page", "ticket")
            assert alert["annotations"].keys() == {"summary", "description"}
