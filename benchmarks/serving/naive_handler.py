"""The handler of the source document: one image per call, with all defaults."""

from pathlib import Path

import torch
from ts.torch_handler.base_handler import BaseHandler
from tutorial import Tutorial


class NaiveHandler(BaseHandler):
    def initialize(self, context):
        super().initialize(context)
        self.tutorial = Tutorial(Path(context.system_properties["model_dir"]))

    def preprocess(self, data):
        images = [self.tutorial.decode(row.get("data") or row.get("body")) for row in data]
        return torch.stack(images).to(self.device)

    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            return self.model(data)  # pyright: ignore[reportCallIssue, reportOptionalCall]

    def postprocess(self, data):
        return self.tutorial.search(data)
