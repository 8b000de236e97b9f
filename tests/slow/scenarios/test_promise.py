"""Runs of the complete system whose model is held, or that cannot deploy."""

import re
from typing import Any, cast

import pytest

from tests.real.scenarios.test_promise import ADA, CLASSES, EVE, NEW_CLASS, Product, product, until

__all__ = ["product"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_held_model_can_be_promoted_by_an_authorized_person(product: Product) -> None:
    first = product.status()["champion"]
    for digit, label in zip(CLASSES, CLASSES[1:] + CLASSES[0], strict=True):  # all new images are mislabeled
        product.add_images(label, digit)
    assert product.watch()["action"] == "retrain"
    prompt = product.question()
    product.clicks(ADA, prompt, "Train")

    assert product.run_to_end().state == "SUCCEEDED"
    notice = product.reply(prompt, "Held")
    status = product.status()
    assert status["default"] == status["champion"] == first
    assert product.recognize("3")["version"] == first

    product.clicks(EVE, notice, "Promote anyway")
    until(lambda: product.slack.ephemeral)
    assert product.status()["champion"] == first
    product.clicks(ADA, notice, "Promote anyway")
    until(lambda: product.status()["champion"] != first)
    assert product.recognize("3")["version"] == product.status()["default"] != first


def test_run_that_cannot_deploy_keeps_the_champion_and_is_reported(product: Product) -> None:
    first = product.status()["champion"]
    product.add_images(NEW_CLASS, digit=NEW_CLASS)
    # The champion's server occupies the ports that the new release needs.
    settings = cast(dict[str, Any], product.executor.overrides["settings"])
    product.executor.overrides["settings"] = settings | {"workdir": str(product.workspace.directory / "elsewhere")}
    product.watch()
    prompt = product.question()
    product.clicks(ADA, prompt, "Train")

    assert product.run_to_end().state == "FAILED"
    # The first step detects this, before anything is trained.
    assert re.search(r"ingest: Port \d+ on 127.0.0.1 is in use", product.reply(prompt, "ailed").text)
    status = product.status()
    assert status["default"] == status["champion"] == first
    assert product.recognize("3")["version"] == first
