#!/usr/bin/env bash
# A session from its creation to its end, with the command line.
set -euo pipefail

scratch=$(mktemp -d)
trap 'rm -rf -- "$scratch"' EXIT

# The id goes to stdout, everything else to stderr.
session=$(cynode session create 2>/dev/null)

# Commands run one after the other in the same sandbox; files persist.
cynode session exec "$session" -- sh -c 'echo one > a.txt'
cynode session exec "$session" -- cat a.txt

# Files go in and out.
echo two >"$scratch/b.txt"
cynode session cp "$scratch/b.txt" "$session:b.txt" >/dev/null
cynode session cp "$session:b.txt" -

# A deadline ends the command and everything that it started. The exit code is 124.
code=0
cynode session exec --timeout 1s "$session" -- sleep 30 2>/dev/null || code=$?
echo "the deadline ended it with $code"

# The workspace survives; a later session of the same task continues with it.
task=$(cynode session show "$session" --output json | jq -r .task_id)
workspace=$(cynode session end "$session" --keep-workspace --output json | jq -r .workspace_id)
session=$(cynode session create --task "$task" --workspace "workspace:$workspace" 2>/dev/null)
cynode session exec "$session" -- cat a.txt b.txt
cynode session end "$session" 2>/dev/null
