# To be sourced. If KFP_AUDIENCE is set, the KFP server trusts GitHub's OpenID Connect tokens for that audience: request
# one as KFP_TOKEN. A token is valid for minutes, so each step requests its own.
if [ -n "$KFP_AUDIENCE" ]; then
  KFP_TOKEN=$(set -o pipefail; curl --silent --show-error --fail --get --data-urlencode "audience=$KFP_AUDIENCE" \
      --header "Authorization: bearer $ACTIONS_ID_TOKEN_REQUEST_TOKEN" "$ACTIONS_ID_TOKEN_REQUEST_URL" |
    jq --raw-output --exit-status .value)
  echo "::add-mask::$KFP_TOKEN"
  export KFP_TOKEN
fi
