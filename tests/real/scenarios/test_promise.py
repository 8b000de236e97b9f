"""The complete system, from new images in a bucket to a class that is recognized.

Real: the bucket's protocol, the watcher and the bot as processes, the compiled pipeline and its
steps, training, gate, TorchServe. On loopback: Slack and Kubeflow Pipelines, which runs the
pipelines on this machine.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from evernear import steps
from evernear.common.store import Store, open_store
from evernear.kubeflow.local_run import pipeline_arguments
from evernear.settings import Settings, load
from tests import ROOT, waiting
from tests.loopback.kfp import KfpServer, LocalExecutor
from tests.loopback.kfp.state import RunControl
from tests.loopback.slack import Person, SlackServer, signed
from tests.loopback.slack.server import BOT_TOKEN, SIGNING_SECRET, PostedMessage
from tests.ports import free_ports
from tests.real.scenarios.workspace import Workspace, write_digits

GOLDEN = ROOT / "pipelines" / "golden" / "continuous_training.yaml"
ADA, EVE = Person("U0ADA", "ada"), Person("U0EVE", "eve")
CHANNEL = "C0TRAINING"
RUN_TIMEOUT_S = 600
TIMEOUT_S = 240.0
until = partial(waiting.until, timeout_s=TIMEOUT_S)
CLASSES, NEW_CLASS = "01234", "9"
FIRST_IMAGES, LATER_IMAGES = 180, 120  # of each class in the first release, and of the new class
pytestmark = pytest.mark.timeout(900)

_numbers = itertools.count()


@dataclass
class Product:
    """The complete system with a live release for `CLASSES`."""

    workspace: Workspace
    images: Store
    kfp: KfpServer
    executor: LocalExecutor
    slack: SlackServer
    bot_url: str

    def add_images(self, label: str, digit: str) -> None:
        """Add new images of ``digit`` under the label ``label``."""
        tree = self.workspace.directory / f"arrived-{next(_numbers)}"
        write_digits(tree, labels=digit, per_class=200)
        for path in sorted(tree.rglob("*.png"), key=lambda path: int(path.stem))[-LATER_IMAGES:]:
            self.images.put(f"{label}/{path.name}", path)

    def watch(self) -> dict[str, Any]:
        """Run one check of the watcher, which acts on its decision."""
        completed = self.workspace.command("watch", "once", "--act", "--json")
        assert completed.returncode == 0, completed.stderr
        return json.loads(completed.stdout)

    def question(self) -> PostedMessage:
        """The prompt of the bot in the channel."""
        until(lambda: [posted for posted in self.slack.messages if "Train" in posted.buttons])
        return next(posted for posted in self.slack.messages if "Train" in posted.buttons)

    def clicks(self, person: Person, posted: PostedMessage, button: str) -> int:
        """Deliver a click as Slack does, signed; return the status that Slack gets."""
        body, headers = signed(self.slack.button(posted, button).by(person), SIGNING_SECRET)
        return httpx.post(f"{self.bot_url}/slack/events", content=body, headers=headers).status_code

    def run_to_end(self) -> RunControl:
        """Wait until the started run ends, and return it."""
        run = self.kfp.wait_for_run(timeout_s=TIMEOUT_S)
        assert run.ended.wait(RUN_TIMEOUT_S), run.state
        return run

    def reply(self, prompt: PostedMessage, words: str) -> PostedMessage:
        """The reply in the thread of ``prompt`` that contains ``words``."""
        in_thread = lambda: [s for s in self.slack.messages if s.thread == prompt.ts and words in s.text]  # noqa: E731
        until(in_thread)
        return in_thread()[0]

    def status(self) -> dict[str, Any]:
        return json.loads(self.workspace.command("status", "--json").stdout)

    def recognize(self, digit: str) -> dict[str, Any]:
        """The response of the prediction API to an image of ``digit``."""
        image = next((self.workspace.directory / "queries" / digit).iterdir())
        return json.loads(self.workspace.command("predict", "--json", str(image)).stdout)


@pytest.fixture
def product(s3_endpoint: str, bucket: str, tmp_path: Path) -> Iterator[Product]:
    (bot_port,) = free_ports(1)
    workspace = Workspace(
        tmp_path,
        EVERNEAR_DATA__SOURCE=f"s3://{bucket}/images",
        EVERNEAR_STORE=f"s3://{bucket}/store",
        EVERNEAR_WATCH__NEW_TRAIN_IMAGES="50",
        EVERNEAR_SLACK__MODE="http",
        EVERNEAR_SLACK__PORT=str(bot_port),
        EVERNEAR_SLACK__CHANNEL=CHANNEL,
        EVERNEAR_PERMISSIONS__START=json.dumps([ADA.id]),
        EVERNEAR_PERMISSIONS__PROMOTE=json.dumps([ADA.id]),
        SLACK_BOT_TOKEN=BOT_TOKEN,
        SLACK_SIGNING_SECRET=SIGNING_SECRET,
    )
    settings = load(preset="quick", environment=workspace.environment)
    images = open_store(settings.data.source)
    write_digits(tmp_path / "queries", labels=CLASSES + NEW_CLASS, per_class=1)
    write_digits(tmp_path / "images", labels=CLASSES, per_class=FIRST_IMAGES)
    for path in (tmp_path / "images").rglob("*.png"):
        images.put(path.relative_to(tmp_path / "images").as_posix(), path)
    first_release(settings, tmp_path / "first")
    executor = LocalExecutor(tmp_path / "kfp", **pipeline_arguments(settings, {}))
    with SlackServer() as slack, KfpServer(executor=executor) as kfp:
        kfp.publish(GOLDEN, version="c0ffee1")
        workspace.environment |= {"EVERNEAR_PIPELINE__ENDPOINT": kfp.url, "EVERNEAR_SLACK__API_URL": slack.api_url}
        bot = workspace.start("slack")
        try:
            until(lambda: answers(f"http://127.0.0.1:{bot_port}/health"))
            yield Product(workspace, images, kfp, executor, slack, f"http://127.0.0.1:{bot_port}")
        finally:
            bot.terminate()
            _, _ = bot.communicate(timeout=TIMEOUT_S)
            workspace.command("stop")


def first_release(settings: Settings, directory: Path) -> None:
    """Run the pipeline's steps in this process, which has already imported torch; in a run, each
    has its own."""
    run, store, chosen = "first", settings.store_uri, pipeline_arguments(settings, {})["settings"]
    names = ("dataset", "trained", "network", "open_set", "embeddings", "index", "evaluation", "verdict", "release")
    path = {name: str(directory / name) for name in names}
    dataset, network, open_set = path["dataset"], path["network"], path["open_set"]
    source = {"source": settings.data.source, "preset": "", "target": settings.target, "serving_image": ""}
    _, chosen = steps.ingest(run, store, source, chosen, dataset)
    steps.train(run, chosen, dataset, path["trained"], str(directory / "curves"))
    steps.export(run, chosen, dataset, path["trained"], network)
    steps.probe(run, chosen, dataset, open_set)
    steps.embed(run, chosen, dataset, network, path["embeddings"])
    steps.index(run, chosen, dataset, path["embeddings"], open_set, path["index"])
    steps.evaluate(run, chosen, dataset, network, path["index"], open_set, path["evaluation"])
    assert steps.gate(run, chosen, path["evaluation"], path["verdict"])
    parts = {name: path[name] for name in ("network", "index", "evaluation", "verdict")}
    steps.archive(run, chosen, dataset, parts, path["release"])
    steps.deploy(run, chosen, "a test", path["release"], path["verdict"])


def test_new_class_is_proposed_trained_deployed_and_recognized(product: Product) -> None:
    first = product.status()["champion"]
    assert product.watch()["action"] == "nothing"
    product.add_images(NEW_CLASS, digit=NEW_CLASS)

    report = product.watch()
    assert report["action"] == "retrain", report
    assert product.watch()["proposal"] in (None, report["proposal"]), "the watcher proposed the same run twice"
    prompt = product.question()

    assert product.clicks(EVE, prompt, "Train") == 200
    until(lambda: product.slack.ephemeral)
    assert product.kfp.runs == [], "an unauthorized person cannot start a run"
    for _ in range(2):
        assert product.clicks(ADA, prompt, "Train") == 200

    run = product.run_to_end()
    assert run.state == "SUCCEEDED", (run.resource, product.slack.messages[-1].text)
    verdict = product.reply(prompt, "Promoted")
    assert [other.id for other in product.kfp.runs] == [run.id], "two clicks, one run"
    status = product.status()
    assert status["default"] == status["champion"] != first
    assert status["champion"] in verdict.text
    until(lambda: product.slack.uploads)  # the confusion matrix, after the reply
    answer = product.recognize(NEW_CLASS)
    assert (answer["pred"], answer["version"]) == (NEW_CLASS, status["champion"])
    assert product.watch()["action"] == "nothing", "the release records what it was trained on"


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False
