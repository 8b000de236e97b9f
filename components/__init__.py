"""One KFP component per step: typed artifacts in, one call into evernear, artifacts out."""

import functools

from kfp import dsl

# A cluster gets an image by digest in its place (`evernear pipeline compile --image ...`): the KFP cache key does
# not see code inside an image, so a moving tag would serve stale results. Run locally, the name is not used.
IMAGE = "evernear-train@sha256:" + 64 * "0"

component = functools.partial(dsl.component, base_image=IMAGE, install_kfp_package=False)
