#!/usr/bin/env bash
# The user API with curl. CYNODE_TOKEN is a user's token; CYNODE_URL defaults to this machine.
set -euo pipefail

url=${CYNODE_URL:-http://127.0.0.1:12080}
: "${CYNODE_TOKEN:?set it, for example to the content of /var/lib/cynode/admin.token}"

# call METHOD PATH [CURL ARGUMENTS…], with a body of JSON unless $type says otherwise
call() {
  local method=$1 path=$2
  shift 2
  curl --silent --show-error --fail-with-body --noproxy '*' --request "$method" \
    --header "Authorization: Bearer $CYNODE_TOKEN" --header "Content-Type: ${type:-application/json}" \
    "$@" "$url$path"
}

# A job, waited for.
call POST /v1/jobs --header 'Prefer: wait=60' \
  --data '{"command": ["sh", "-c", "echo from a job; exit 3"], "timeout_seconds": 60}' |
  jq -r '"\(.state), exit code \(.exit_code)"'

# A session, and a command in it.
session=$(call POST /v1/sessions --data '{}' | jq -r .session_id)
call POST "/v1/sessions/$session/exec" \
  --data '{"argv": ["sh", "-c", "echo hello > note; wc -c < note"], "timeout_ms": 10000}' |
  jq -j .stdout

# A file, written and read.
type=application/octet-stream call PUT "/v1/sessions/$session/files?path=greeting.txt" \
  --data-binary $'good morning\n' | jq -r '"\(.size) bytes"'

# A patch, applied whole or not at all.
diff='--- a/greeting.txt
+++ b/greeting.txt
@@ -1 +1 @@
-good morning
+good evening
'
call POST "/v1/sessions/$session/files:patch" --data "$(jq -n --arg diff "$diff" '{$diff}')" >/dev/null
call GET "/v1/sessions/$session/files?path=greeting.txt"

call POST "/v1/sessions/$session/end" --data '{}' | jq -r .state
