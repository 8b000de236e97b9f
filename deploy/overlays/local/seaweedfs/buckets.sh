#!/bin/sh
# buckets.sh BUCKET...: create the buckets as soon as the local server responds; existing buckets are unchanged.
set -eu
s3=${SEAWEEDFS_S3:-http://127.0.0.1:8333}
master=${SEAWEEDFS_MASTER:-127.0.0.1:9333}

until wget -q -O /dev/null "$s3/healthz"; do sleep 1; done
for bucket; do echo "s3.bucket.create -name $bucket"; done | weed shell "-master=$master"
made=$(echo s3.bucket.list | weed shell "-master=$master")
for bucket; do
  echo "$made" | grep -q "^  $bucket[[:space:]]" || { echo "The bucket $bucket was not made." >&2; exit 1; }
done
