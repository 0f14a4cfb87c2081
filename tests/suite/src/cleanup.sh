# shellcheck shell=sh disable=SC2013 # process ids are words
# Waits for end-of-file on standard input, which only the test holds open, then kills every process
# of a directory and removes it.
cat >/dev/null
dir=$1; podman=$2
for pid in $(cat "$dir"/pids 2>/dev/null); do kill -9 "$pid" 2>/dev/null; done
# SIGTERM makes Docker's daemon end its containers; the rest is killed by cgroup.
if [ -f "$dir/docker/pid" ]; then
    pid=$(cat "$dir/docker/pid")
    tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -qF "$dir" && kill "$pid" 2>/dev/null
    for _ in $(seq 1 200); do
        grep -qs '^State:.[^ZX]' "/proc/$pid/status" || break
        sleep 0.1
    done
fi
for procs in /sys/fs/cgroup/"${dir##*/}"/*/cgroup.procs /sys/fs/cgroup/*/"${dir##*/}"/*/cgroup.procs; do
    for pid in $(cat "$procs" 2>/dev/null); do kill -9 "$pid" 2>/dev/null; done
done
if [ -f "$dir/state/worker/podman/service.json" ]; then
    pid=$(sed 's/.*"pid":\([0-9]*\).*/\1/' "$dir/state/worker/podman/service.json")
    tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -qF "$dir" && kill -9 "$pid" 2>/dev/null
fi
# Only a process of the same user can enter the namespaces of rootless containers.
if [ -d "$dir/xdg" ]; then
    user=$(stat -c %u "$dir/xdg")
    runtime=$dir/xdg
    session=XDG_RUNTIME_DIR=$runtime
    if [ -e "$dir/without-session" ]; then
        runtime=/tmp/podman-run-$user
        session=--unset=XDG_RUNTIME_DIR
    fi
    timeout 60 setpriv --reuid="$user" --regid="$user" --clear-groups env --chdir="$dir" "$session" HOME="$dir/home" "$podman" --root "$dir/root" --runroot "$dir/run" --storage-driver overlay --runtime runc --cgroup-manager cgroupfs --events-backend none rm -f -a -t 0 >/dev/null 2>&1
    # Podman keeps the namespace alive with one process per user.
    for file in "$runtime"/libpod/tmp/pause.pid "$dir"/*/libpod/tmp/pause.pid; do
        pid=$(cat "$file" 2>/dev/null)
        [ -z "$pid" ] || ! grep -qs -e podman -e catatonit "/proc/$pid/cmdline" || kill -9 "$pid" 2>/dev/null
    done
    [ ! -e "$dir/without-session" ] || rm -rf "/tmp/podman-run-$user" "/tmp/containers-user-$user" "/tmp/cynode-$user"
elif [ -d "$dir/root" ]; then
    timeout 60 "$podman" --root "$dir/root" --runroot "$dir/run" --storage-driver overlay --runtime runc --cgroup-manager cgroupfs --events-backend none rm -f -a -t 0 >/dev/null 2>&1
fi
# Monitors and Podman's own cleanup may still write below the directory.
for _ in 1 2 3 4 5 6 7 8 9 10; do
    again=
    for pid in $(grep -lF "$dir" /proc/[0-9]*/cmdline 2>/dev/null | cut -d/ -f3); do
        if ! grep -qF -e cynode-test-cleanup -e grep "/proc/$pid/cmdline" 2>/dev/null; then
            kill -9 "$pid" 2>/dev/null && again=1
        fi
    done
    [ -n "$again" ] || break
    sleep 0.1
done
grep -F " $dir/" /proc/self/mountinfo | cut -d' ' -f5 | sort -r | while read -r mount; do umount -l "$mount" 2>/dev/null; done
for _ in 1 2 3 4 5 6 7 8 9 10; do
    left=
    for group in /sys/fs/cgroup/"${dir##*/}" /sys/fs/cgroup/*/"${dir##*/}"; do
        [ -d "$group" ] || continue
        find "$group" -depth -type d -exec rmdir {} \; 2>/dev/null
        [ ! -d "$group" ] || left=1
    done
    [ -n "$left" ] || break
    sleep 0.1
done
rm -rf "$dir"
