"""The handler of the source document: one image per call, with all defaults."""

import io
import json
from collections import Counter
from pathlib import Path

import faiss
import numpy as np
import torch
from PIL import Image
from torchvision import transforms
from ts.torch_handler.base_handler import BaseHandler

K = 5


def _to_rgb(image):
    return image.convert("RGB")


class NaiveHandler(BaseHandler):
    def initialize(self, context):
        super().initialize(context)
        directory = Path(context.system_properties["model_dir"])
        self.index = faiss.read_index(str(directory / "index.faiss"))
        self.label_indices = np.load(directory / "labels.npy")
        metadata = json.loads((directory / "naive.json").read_text())
        self.names = metadata["labels"]
        self.transform = transforms.Compose(
            [
                transforms.Grayscale() if metadata["channels"] == 1 else transforms.Lambda(_to_rgb),
                transforms.Resize(min(metadata["size"])),
                transforms.CenterCrop(metadata["size"]),
                transforms.ToTensor(),
                transforms.Normalize(0, 1 / 255),  # the network normalizes and expects pixels in 0..255
            ]
        )

    def preprocess(self, data):
        images = [Image.open(io.BytesIO(row.get("data") or row.get("body"))) for row in data]
        return torch.stack([self.transform(image) for image in images]).to(self.device)

    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            return self.model(data)  # pyright: ignore[reportCallIssue, reportOptionalCall]

    def postprocess(self, data):
        squared, rows = self.index.search(data.cpu().numpy(), K)
        answers = []
        for distances, neighbors in zip(squared, rows, strict=True):
            labels = [self.names[self.label_indices[row]] for row in neighbors]
            answers.append({"pred": Counter(labels).most_common(1)[0][0], "dist": float(distances[0]) ** 0.5})
        return answers
