#!/usr/bin/env bash
# Puts evernear, its object store (SeaweedFS) and Secrets of random values onto the cluster that kubectl speaks to.
# Wants PREP_IMAGE and TRIGGERS_IMAGE, by digest. Slack has no workspace here, so the bot is not started.
# Run again, it keeps the values of the Secrets that are there: the store and the pods go on with them.
set -euo pipefail
shopt -s inherit_errexit  # a value that could not be read must not be replaced by a new one
cd "$(dirname "$0")/../.."

random() { openssl rand -hex 20; }
make_secret() {
  local namespace=$1 name=$2
  shift 2
  kubectl --namespace "$namespace" create secret generic "$name" --dry-run=client --output=yaml \
    "${@/#/--from-literal=}" | kubectl apply --filename -
}
value() {  # of a Secret in the namespace evernear: the one that it has, else a new one
  local held
  held=$(kubectl --namespace evernear get secret "$1" --ignore-not-found --output "jsonpath={.data.$2}" | base64 --decode)
  echo "${held:-$(random)}"
}
keys_of() {  # a user of the object store, in the array keys
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
