#!/usr/bin/env bash
# Puts evernear, its object store (MinIO) and Secrets of random values onto the cluster that kubectl speaks to.
# Wants PREP_IMAGE and TRIGGERS_IMAGE, by digest. Slack has no workspace here, so the bot is not started.
set -euo pipefail
cd "$(dirname "$0")/../.."

random() { openssl rand -hex 20; }
make_secret() {
  local namespace=$1 name=$2
  shift 2
  kubectl --namespace "$namespace" create secret generic "$name" --dry-run=client --output=yaml \
    "${@/#/--from-literal=}" | kubectl apply --filename -
}
new_keys() {  # of another user of the object store, in the array keys
  keys=(
    AWS_ENDPOINT_URL=http://evernear-minio.evernear:9000 AWS_REGION=us-east-1
    "AWS_ACCESS_KEY_ID=$(random)" "AWS_SECRET_ACCESS_KEY=$(random)"
  )
}

kubectl create namespace evernear --dry-run=client --output=yaml | kubectl apply --filename -
new_keys
make_secret evernear evernear-s3 "${keys[@]}"
make_secret kubeflow evernear-s3 "${keys[@]}"
for user in reader queries watch; do
  new_keys
  make_secret evernear "evernear-s3-$user" "${keys[@]}"
done
token=$(random)
make_secret evernear evernear-token "token=$token"
make_secret kubeflow evernear-token "token=$token"
make_secret evernear evernear-minio-root "MINIO_ROOT_USER=$(random)" "MINIO_ROOT_PASSWORD=$(random)"

overlay=$(mktemp --directory --tmpdir=deploy/overlays)
trap 'rm -rf "$overlay"' EXIT
image() { echo "  - {name: registry.invalid/evernear-$1, newName: ${2%@*}, digest: \"${2#*@}\"}"; }
cat > "$overlay/kustomization.yaml" <<END
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../local]
images:
$(image prep "$PREP_IMAGE")
$(image triggers "$TRIGGERS_IMAGE")
replicas:
  - {name: evernear-slack, count: 0}
END
kubectl apply --server-side --kustomize "$overlay"
kubectl --namespace evernear wait job/evernear-minio-users --for=condition=complete --timeout=10m
