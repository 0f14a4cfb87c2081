# shellcheck shell=sh disable=SC2317 # Some functions are called by name.
# Probes of `cynode image check`, run in a sandbox of the image. Prints a line for each: whether all
# sandbox images must pass it (baseline), or those for agents (runner), or none (recommended); the
# result; the name; a detail. Needs nothing but a POSIX shell.
probe() { printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$4"; }
ok() { probe "$1" ok "$2" "$3"; }
missing() { probe "$1" missing "$2" "$3"; }
tools() {
  level=$1
  shift
  for tool; do
    found=$(command -v "$tool" 2>/dev/null)
    if [ "$found" ]; then ok "$level" "$tool" "$found"; else missing "$level" "$tool" 'not in the PATH'; fi
  done
}
# holds LEVEL NAME DETAIL REMEDY COMMAND…
holds() {
  level=$1 name=$2 detail=$3 remedy=$4
  shift 4
  if "$@" >/dev/null 2>&1; then ok "$level" "$name" "$detail"; else missing "$level" "$name" "$remedy"; fi
}
writable() {
  text=
  echo probe >"$1/.probe" && read -r text <"$1/.probe" && rm -f "$1/.probe" && [ "$text" = probe ]
}
identity() {
  while read -r key id rest; do
    [ "$key" = Uid: ] && echo "$id" && return
  done </proc/self/status
}

ok baseline /bin/sh 'runs scripts'
uid=$(identity)
holds baseline 'non-root user' "uid $uid" 'runs as root' [ "${uid:-0}" != 0 ]
tools baseline cat cp mv rm mkdir chmod chown find tar gzip unzip zip ps
if command -v env >/dev/null 2>&1; then
  ok baseline 'env or printenv' env
elif command -v printenv >/dev/null 2>&1; then
  ok baseline 'env or printenv' printenv
else
  missing baseline 'env or printenv' 'neither is in the PATH'
fi
trust=
for file in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt \
  /etc/ssl/cert.pem /etc/ssl/ca-bundle.pem; do
  [ -s "$file" ] && trust=$file
done
holds baseline 'TLS trust store' "$trust" 'install ca-certificates' [ "$trust" ]
for directory in /workspace /tmp; do
  holds baseline "$directory" writable 'is not writable' writable "$directory"
done
if command -v date >/dev/null 2>&1; then
  ok recommended date ''
else
  probe recommended absent date 'steps that need it fail'
fi

tools runner bash diff jq git python3
holds runner 'bash runs' '' 'bash does not run' bash -c '[[ a == a ]]'
holds runner 'python3 runs' 'with json and ssl' 'its json or ssl is missing' \
  python3 -c 'import json, ssl'
holds runner 'jq runs' '' 'jq does not run' jq -n 1
repository=/tmp/.probe-repository
in_git() { git init -q "$repository" && git -C "$repository" status; }
holds runner 'git runs' locally 'git does not work on a local repository' in_git
rm -rf "$repository" 2>/dev/null
holds runner /job 'writable, with artifacts' 'is not writable' writable "${CYNODE_ARTIFACTS_DIR:-/none}"
# The entrypoint of a runner is the agent that the worker mounts.
holds runner 'non-root entrypoint' "cynode-sba as uid $uid" 'cynode-sba does not run' \
  /run/cynode/cynode-sba schema
echo end
echo end >&2
exit 42
