#!/usr/bin/env bash
# Installs evernear, its object store (SeaweedFS) and Secrets with random values on the cluster that kubectl selects.
# Requires PREP_IMAGE and TRIGGERS_IMAGE, by digest. The bot is not started because it has no Slack workspace.
# A repeated run keeps the values of existing Secrets, which the store and the pods use.
set -euo pipefail
shopt -s inherit_errexit  # never replace a value that could not be read
cd "$(dirname "$0")/../.."

random() { openssl rand -hex 20; }
make_secret() {
  local namespace=$1 name=$2
  shift 2
  kubectl --namespace "$namespace" create secret generic "$name" --dry-run=client --output=yaml \
    "${@/#/--from-literal=}" | kubectl apply --filename -
}
value() {  # SECRET KEY: the existing value in the namespace evernear, or a new one
  local current
  current=$(kubectl --namespace evernear get secret "$1" --ignore-not-found --output "jsonpath={.data.$2}" | base64 --decode)
  echo "${current:-$(random)}"
}
keys_of() {  # SECRET: fill the array keys for a user of the object store
  local access_key secret_key
  access_key=$(value "$1" AWS_ACCESS_KEY_ID)
  secret_key=$(value "$1" AWS_SECRET_ACCESS_KEY)
  keys=(
    AWS_ENDPOINT_URL=http://evernear-seaweedfs.evernear:8333 AWS_REGION=us-east-1
    "AWS_ACCESS_KEY_ID=$access_key" "AWS_SECRET_ACCESS_KEY=$secret_key"
  )
}

kubectl create namespace evernear --dry-run=client --output=yaml | kubectl apply --filename -
keys_of evernear-s3
make_secret evernear evernear-s3 "${keys[@]}"
make_secret kubeflow evernear-s3 "${keys[@]}"
for user in admin reader queries watch; do
  keys_of "evernear-s3-$user"
  make_secret evernear "evernear-s3-$user" "${keys[@]}"
done
token=$(value evernear-token token)
make_secret evernear evernear-token "token=$token"
make_secret kubeflow evernear-token "token=$token"

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
kubectl --namespace evernear rollout status deployment/evernear-seaweedfs --timeout=10m
