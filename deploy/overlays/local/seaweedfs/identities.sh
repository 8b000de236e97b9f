#!/bin/sh
# identities.sh FILE USER...: write SeaweedFS's S3 configuration, with the policies in the directory of this script.
# A user's keys come from the environment: READER_ACCESS_KEY, READER_SECRET_KEY. docs/object-store.md lists the users.
set -eu
umask 077
file=$1
shift

quoted() {  # the file as a JSON string
  tr -d '\n' < "$1" | sed 's/[\\"]/\\&/g; s/.*/"&"/'
}

identity() {  # a user with keys and permissions
  prefix=$(echo "$1" | tr '[:lower:]' '[:upper:]')
  eval "access_key=\${${prefix}_ACCESS_KEY:-} secret_key=\${${prefix}_SECRET_KEY:-}"
  case "$1" in
    admin) rights='"actions": ["Admin"]' ;;
    pipeline) rights='"policyNames": ["images", "pipeline"]' ;;
    reader) rights='"policyNames": ["reader"]' ;;
    queries) rights='"policyNames": ["queries"]' ;;
    watch) rights='"policyNames": ["images", "watch"]' ;;
    *) echo "There is no user $1." >&2; exit 1 ;;
  esac
  for key in "$access_key" "$secret_key"; do
    case "$key" in
      '' | *[!A-Za-z0-9/+=_-]*) echo "A key of the user $1 is empty, or has other characters than A-Z a-z 0-9 / + = _ -." >&2; exit 1 ;;
    esac
  done
  printf '{"name": "%s", "credentials": [{"accessKey": "%s", "secretKey": "%s"}], %s}' \
    "$1" "$access_key" "$secret_key" "$rights"
}

{
  printf '{"identities": ['
  comma=
  for user; do
    printf '%s' "$comma"
    identity "$user"
    comma=', '
  done
  printf '], "policies": ['
  comma=
  for policy in "$(dirname "$0")"/*.json; do
    printf '%s{"name": "%s", "content": %s}' "$comma" "$(basename "$policy" .json)" "$(quoted "$policy")"
    comma=', '
  done
  printf ']}\n'
} > "$file.part"
mv "$file.part" "$file"
