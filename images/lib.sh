# shellcheck shell=bash
# Functions shared by images/build, images/fixture and images/check. Sourced, never run.
#
# Images are written as a `dir:` image (manifest, config, layers) and loaded with `podman pull`. Unlike `podman import`,
# this supports several layers, gives the same id for the same content, and skips layers that the store already has.

# The modes of packed files must not depend on the caller's umask.
umask 022

program=images/${0##*/}
say() { printf '%s: %s\n' "$program" "$*" >&2; }
die() {
  say "$*"
  exit 1
}

# Arguments for every podman call: those of --into "…", then defaults for this host.
podman_args=()

into() {
  read -r -a podman_args <<<"$1"
}

# Called once, after the options. crun does not support hybrid cgroups, which need runc; and without systemd (or a
# systemd session, for an ordinary user) Podman must manage cgroups itself.
suit_host() {
  if [[ $(stat -fc %T /sys/fs/cgroup 2>/dev/null) != cgroup2fs && " ${podman_args[*]} " != *" --runtime"* ]]; then
    PATH=$PATH:/usr/sbin command -v runc >/dev/null || die "this host uses cgroups v1, which need runc. Remedy: scripts/setup"
    podman_args+=(--runtime runc)
  fi
  if [[ " ${podman_args[*]} " != *" --cgroup-manager"* ]] &&
    [[ ! -d /run/systemd/system || ($EUID -ne 0 && ! -S ${XDG_RUNTIME_DIR:-/nonexistent}/systemd/private) ]]; then
    podman_args+=(--cgroup-manager cgroupfs)
  fi
}

podman_() { podman "${podman_args[@]}" "$@"; }

require() {
  local missing=() tool
  for tool in "$@"; do
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  ((${#missing[@]} == 0)) || die "missing: ${missing[*]}. Remedy: scripts/setup"
}

cache_dir() {
  if [[ ${CYNODE_CACHE_DIR:-} ]]; then
    echo "$CYNODE_CACHE_DIR"
  elif [[ ${XDG_CACHE_HOME:-} ]]; then
    echo "$XDG_CACHE_HOME/cynode"
  elif ((EUID == 0)); then
    echo /var/cache/cynode
  else
    echo "$HOME/.cache/cynode"
  fi
}

sha256() { sha256sum "$@" | cut -d' ' -f1; }

# put_layer DIR TAR [SHA256]: links a layer into the image directory and prints its digest.
put_layer() {
  local directory=$1 tar=$2 digest=${3:-}
  [[ $digest ]] || digest=$(sha256 "$tar")
  ln -s "$(realpath "$tar")" "$directory/$digest"
  echo "$digest"
}

# write_image DIR CONFIG_JSON oci|docker LAYER_DIGEST…: writes config and manifest for the layers in DIR.
# CONFIG_JSON is the image's `config` object. Only Docker's format has health checks.
write_image() {
  local directory=$1 config=$2 format=$3 architecture layers='[]' digest
  shift 3
  case "$(uname -m)" in
    x86_64) architecture=amd64 ;;
    aarch64) architecture=arm64 ;;
    *) architecture=$(uname -m) ;;
  esac
  for digest in "$@"; do
    layers=$(jq -c --arg d "$digest" --argjson s "$(stat -Lc %s "$directory/$digest")" '. + [{digest: ("sha256:" + $d), size: $s}]' <<<"$layers")
  done

  jq -cSn --argjson config "$config" --argjson layers "$layers" --arg architecture "$architecture" '{
    created: "2026-01-01T00:00:00Z", architecture: $architecture, os: "linux", config: $config,
    rootfs: {type: "layers", diff_ids: [$layers[].digest]},
    history: [$layers[] | {created: "2026-01-01T00:00:00Z", created_by: "cynode images"}]
  }' >"$directory/config.json"
  digest=$(sha256 "$directory/config.json")
  mv "$directory/config.json" "$directory/$digest"

  jq -cSn --argjson layers "$layers" --arg digest "sha256:$digest" --argjson size "$(stat -c %s "$directory/$digest")" --arg format "$format" '
    {oci: {manifest: "application/vnd.oci.image.manifest.v1+json", config: "application/vnd.oci.image.config.v1+json", layer: "application/vnd.oci.image.layer.v1.tar"},
     docker: {manifest: "application/vnd.docker.distribution.manifest.v2+json", config: "application/vnd.docker.container.image.v1+json", layer: "application/vnd.docker.image.rootfs.diff.tar"}
    }[$format] as $type | {
      schemaVersion: 2, mediaType: $type.manifest,
      config: {mediaType: $type.config, digest: $digest, size: $size},
      layers: [$layers[] | {mediaType: $type.layer} + .]
    }' >"$directory/manifest.json"
  printf 'Directory Transport Version: 1.1\n' >"$directory/version"
}

# load_image DIR NAME…: loads the image under every name and prints its id. Some versions of Podman also add a name
# derived from the directory, which is removed.
load_image() {
  local directory=$1 name id
  shift
  id=$(podman_ pull --quiet "dir:$directory") || die "podman could not load the image; its message is above"
  for name in "$@"; do podman_ tag "$id" "$name"; done
  while read -r name; do
    case $name in *"$directory"*) podman_ untag "$id" "$name" ;; esac
  done < <(podman_ image inspect --format '{{range .RepoTags}}{{println .}}{{end}}' "$id")
  echo "$id"
}

# label IMAGE KEY: prints the value of a label, or nothing if the image or label does not exist.
label() { podman_ image inspect --format "{{index .Config.Labels \"$2\"}}" "$1" 2>/dev/null || true; }
