#!/usr/bin/env bash
# Uploads the pipelines to Kubeflow Pipelines, runs one from images to a Deployment, rolls out a second release,
# and rolls back. Requires EVERNEAR_PIPELINE__ENDPOINT, TRAIN_IMAGE, SERVE_IMAGE and the objects of install.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH="$PWD/.venv/bin:$PATH"

live_release() {
  kubectl --namespace evernear get deployment evernear-serving \
    --output "jsonpath={.metadata.annotations['evernear\.dev/release']}"
}
defaults=(
  store=s3://evernear source=digits target=kubernetes
  "serving_image=$SERVE_IMAGE"
  kubernetes.token_secret=evernear-token
  kubernetes.replicas_min=1 kubernetes.replicas_max=1
  kubernetes.cpu=500m
  pipeline.task_cpu=1 pipeline.task_memory=2G pipeline.train_cpu=2 pipeline.train_memory=4G
)
evernear pipeline upload --image "$TRAIN_IMAGE" "${defaults[@]/#/--set=}"
evernear pipeline upload --image "$TRAIN_IMAGE" "${defaults[@]/#/--set=}"  # idempotent

evernear pipeline run continuous-training --wait
first=$(live_release)
# The gate may hold a release of an equal model; a lower significance avoids that here.
evernear pipeline run continuous-training --wait --set train.seed=1 --set gate.significance=0.0001
second=$(live_release)
test "$first" != "$second"
evernear pipeline run rollback --wait --set "reason=end to end"
test "$(live_release)" = "$first"
