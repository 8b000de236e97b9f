# Sourced: puts GitHub's own identity into KFP_TOKEN, where the KFP server trusts it (the variable KFP_AUDIENCE names
# the audience that it expects). It lives for minutes, so each step asks for one.
if [ -n "$KFP_AUDIENCE" ]; then
  KFP_TOKEN=$(curl --silent --show-error --fail --get --data-urlencode "audience=$KFP_AUDIENCE" \
      --header "Authorization: bearer $ACTIONS_ID_TOKEN_REQUEST_TOKEN" "$ACTIONS_ID_TOKEN_REQUEST_URL" |
    jq --raw-output --exit-status .value)
  echo "::add-mask::$KFP_TOKEN"
  export KFP_TOKEN
fi
