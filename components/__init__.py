"""One KFP component per step: typed artifacts in, one call into evernear, artifacts out."""

import functools
import os

from kfp import dsl

# A cluster gets the image by digest (`python -m pipelines.compile --image ...@sha256:...`): the KFP cache key does
# not see code inside an image, so a moving tag would serve stale results. Run locally, the name is not used.
IMAGE = os.environ.get("TRAIN_IMAGE", "evernear-train@sha256:" + 64 * "0")

component = functools.partial(dsl.component, base_image=IMAGE, install_kfp_package=False)
