/* Attempts of hostile code in a sandbox against the kernel that it shares with the host.
 *
 *     attempts kernel | network | files    every attempt of the group, one line of JSON each, then
 *                                          {"name":"done"}
 *     attempts exhaust KIND                exhausts a resource, prints "full", and holds it until killed
 *     attempts probe KIND                  takes one of a resource; exits with 0 or the errno
 *     attempts listen NAME                 accepts connections on an abstract name
 *     attempts control COUNT               connects COUNT times at once as a fake agent; prints how many
 *                                          connections were refused
 *     attempts signals                     sends every signal to process 1
 *     attempts fill DIRECTORY COUNT BYTES  creates COUNT files, 1,000 in each directory; prints how many
 *                                          exist and the errno that stopped it
 *     attempts deep DIRECTORY LEVELS       nests directories deeper than any path is long
 *     attempts forks                       prints "lit", then every process forks forever and ignores
 *                                          all signals that can be ignored
 *
 * Each attempt runs in its own process and exits with 0 if it succeeded, or with the errno that stopped
 * it. A killed attempt was stopped too. "refused" means that the system denied the call; "reached" means
 * that the call got past the filter to the kernel's argument checks, which counts as a failure of the
 * filter. Successful attempts are harmless: they open and do not write.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <sched.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define HIGH (1UL << 32)

static int verdict(long result) { return result < 0 ? errno : 0; }

/* Runs one attempt. With `strict`, EINVAL and the like don't count as a refusal. */
static void attempt_(const char *name, int strict, int (*run)(const void *), const void *argument) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        alarm(15);
        int error = run(argument);
        _exit(error > 255 ? 255 : error);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) < 0) {
        printf("{\"name\":\"%s\",\"outcome\":\"error\",\"errno\":%d}\n", name, errno);
        return;
    }
    if (WIFSIGNALED(status)) {
        printf("{\"name\":\"%s\",\"outcome\":\"%s\",\"signal\":%d}\n", name, WTERMSIG(status) == SIGALRM ? "hung" : "refused", WTERMSIG(status));
        return;
    }
    int error = WEXITSTATUS(status);
    const char *outcome = "refused";
    if (error == 0)
        outcome = "succeeded";
    else if (strict && error != EPERM && error != EACCES && error != ENOSYS && error != EAFNOSUPPORT && error != EPROTONOSUPPORT)
        outcome = "reached";
    printf("{\"name\":\"%s\",\"outcome\":\"%s\",\"errno\":%d}\n", name, outcome, error);
}

/* A system call with up to five arguments. */
struct call {
    const char *name;
    long number;
    unsigned long arguments[5];
};

static int run_call(const void *argument) {
    const struct call *call = argument;
    const unsigned long *a = call->arguments;
    long result = syscall(call->number, a[0], a[1], a[2], a[3], a[4]);
    return verdict(result);
}

static void calls(const struct call *list, size_t count) {
    for (size_t index = 0; index < count; index++)
        attempt_(list[index].name, 1, run_call, &list[index]);
}

/* --- namespaces ------------------------------------------------------------------------------------------------------- */

struct flag {
    const char *name;
    unsigned long value;
};

static const struct flag namespaces[] = {
    {"mount", CLONE_NEWNS},   {"cgroup", CLONE_NEWCGROUP}, {"uts", CLONE_NEWUTS}, {"ipc", CLONE_NEWIPC},
    {"user", CLONE_NEWUSER}, {"pid", CLONE_NEWPID},       {"net", CLONE_NEWNET}, {"time", 0x80},
};

static int run_unshare(const void *flags) { return verdict(syscall(SYS_unshare, (unsigned long)flags)); }

static int run_clone(const void *flags) {
    /* In the child 0 is returned, in the parent its id: success either way. */
    return verdict(syscall(SYS_clone, (unsigned long)flags | SIGCHLD, 0, 0, 0, 0));
}

static int run_clone3(const void *flags) {
    uint64_t arguments[8] = {(unsigned long)flags, 0, 0, 0, SIGCHLD, 0, 0, 0};
    return verdict(syscall(SYS_clone3, arguments, sizeof arguments));
}

static int run_setns(const void *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno;
    return verdict(syscall(SYS_setns, fd, 0));
}

/* --- terminals, ids, process 1 ---------------------------------------------------------------------------------------- */

static int run_terminal(const void *command) {
    setsid();
    int master = open("/dev/ptmx", O_RDWR | O_NOCTTY);
    int unlock = 0, number = 0;
    if (master < 0 || ioctl(master, TIOCSPTLCK, &unlock) < 0 || ioctl(master, TIOCGPTN, &number) < 0)
        return errno;
    char path[64];
    snprintf(path, sizeof path, "/dev/pts/%d", number);
    int slave = open(path, O_RDWR);
    if (slave < 0)
        return errno;
    char text[] = "x";
    return verdict(syscall(SYS_ioctl, slave, (unsigned long)command, text));
}

static int run_capset(const void *unused) {
    (void)unused;
    struct { uint32_t version; int pid; } header = {0x20080522, 0};
    struct { uint32_t effective, permitted, inheritable; } data[2] = {{~0U, ~0U, ~0U}, {~0U, ~0U, ~0U}};
    return verdict(syscall(SYS_capset, &header, data));
}

static int run_groups(const void *unused) {
    (void)unused;
    gid_t group = 0;
    return verdict(syscall(SYS_setgroups, 1, &group));
}

static int run_new_privileges(const void *unused) {
    (void)unused;
    return verdict(prctl(PR_SET_NO_NEW_PRIVS, 0, 0, 0, 0));
}

static int run_ptrace(const void *request) { return verdict(syscall(SYS_ptrace, (long)request, 1, 0, 0)); }

static int run_read_memory(const void *unused) {
    (void)unused;
    char buffer[16];
    struct iovec local = {buffer, sizeof buffer}, remote = {(void *)0x400000, sizeof buffer};
    return verdict(process_vm_readv(1, &local, 1, &remote, 1, 0));
}

static int run_steal_descriptor(const void *unused) {
    (void)unused;
    int fd = (int)syscall(SYS_pidfd_open, 1, 0);
    if (fd < 0)
        return errno;
    return verdict(syscall(SYS_pidfd_getfd, fd, 0, 0));
}

static int run_prlimit(const void *unused) {
    (void)unused;
    struct rlimit limit = {8, 8};
    return verdict(prlimit(1, RLIMIT_NOFILE, &limit, NULL));
}

static int run_raise(const void *unused) {
    (void)unused;
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_max += 1;
    return verdict(setrlimit(RLIMIT_NOFILE, &limit));
}

static int run_core(const void *unused) {
    (void)unused;
    struct rlimit limit = {1 << 20, 1 << 20};
    return verdict(setrlimit(RLIMIT_CORE, &limit));
}

static int run_fifo(const void *unused) {
    (void)unused;
    struct sched_param parameter = {.sched_priority = 50};
    return verdict(sched_setscheduler(0, SCHED_FIFO, &parameter));
}

static int run_nice(const void *unused) {
    (void)unused;
    return verdict(setpriority(PRIO_PROCESS, 0, -20));
}

/* --- the other calling conventions ------------------------------------------------------------------------------------ */

static int run_x32(const void *unused) {
    (void)unused;
    return verdict(syscall(0x40000000 | SYS_socket, 40, SOCK_STREAM, 0));
}

#ifdef __x86_64__
static int run_i386(const void *unused) {
    (void)unused;
    int result = -1;
    /* socket(AF_VSOCK, SOCK_STREAM, 0) through the 32-bit system call. */
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(359), "b"(40), "c"(1), "d"(0) : "memory", "r8", "r9", "r10", "r11");
    if (result < 0) {
        errno = -result;
        return errno;
    }
    return 0;
}
#endif

static char scratch[4096];
#define MEMORY ((unsigned long)scratch)
#define TEXT(text) ((unsigned long)(text))

static void kernel(void) {
    char name[80];
    for (size_t index = 0; index < sizeof namespaces / sizeof *namespaces; index++) {
        const struct flag *kind = &namespaces[index];
        snprintf(name, sizeof name, "unshare a %s namespace", kind->name);
        attempt_(name, 1, run_unshare, (void *)kind->value);
        snprintf(name, sizeof name, "unshare a %s namespace, high bits set", kind->name);
        attempt_(name, 1, run_unshare, (void *)(kind->value | HIGH));
        snprintf(name, sizeof name, "clone3 into a %s namespace", kind->name);
        attempt_(name, 1, run_clone3, (void *)kind->value);
        /* In clone that bit belongs to the exit signal. */
        if (kind->value != 0x80) {
            snprintf(name, sizeof name, "clone into a %s namespace", kind->name);
            attempt_(name, 1, run_clone, (void *)kind->value);
            snprintf(name, sizeof name, "clone into a %s namespace, high bits set", kind->name);
            attempt_(name, 1, run_clone, (void *)(kind->value | HIGH));
        }
    }
    attempt_("unshare user and mount at once", 1, run_unshare, (void *)(unsigned long)(CLONE_NEWUSER | CLONE_NEWNS));
    attempt_("setns to process 1's mounts", 1, run_setns, "/proc/1/ns/mnt");
    attempt_("setns to the own user namespace", 1, run_setns, "/proc/self/ns/user");
    attempt_("setns to the own network", 1, run_setns, "/proc/self/ns/net");

    attempt_("TIOCSTI on a terminal", 1, run_terminal, (void *)0x5412UL);
    attempt_("TIOCSTI on a terminal, high bits set", 1, run_terminal, (void *)(0x5412UL | HIGH));
    attempt_("TIOCLINUX on a terminal", 1, run_terminal, (void *)0x541cUL);
    attempt_("every capability by capset", 1, run_capset, NULL);
    attempt_("group 0 by setgroups", 1, run_groups, NULL);
    attempt_("no-new-privileges taken back", 0, run_new_privileges, NULL);
    attempt_("ptrace attach to process 1", 1, run_ptrace, (void *)PTRACE_ATTACH);
    attempt_("ptrace seize of process 1", 1, run_ptrace, (void *)PTRACE_SEIZE);
    attempt_("process_vm_readv of process 1", 1, run_read_memory, NULL);
    attempt_("pidfd_getfd from process 1", 1, run_steal_descriptor, NULL);
    attempt_("prlimit of process 1", 1, run_prlimit, NULL);
    attempt_("more open files than allowed", 1, run_raise, NULL);
    attempt_("core files", 1, run_core, NULL);
    attempt_("real-time scheduling", 1, run_fifo, NULL);
    attempt_("a higher priority", 1, run_nice, NULL);
    attempt_("x32 system call", 1, run_x32, NULL);
#ifdef __x86_64__
    attempt_("i386 system call", 1, run_i386, NULL);
#endif

    const struct call list[] = {
        {"mount tmpfs", SYS_mount, {TEXT("none"), TEXT("/tmp"), TEXT("tmpfs"), 0, 0}},
        {"mount proc", SYS_mount, {TEXT("none"), TEXT("/tmp"), TEXT("proc"), 0, 0}},
        {"bind mount", SYS_mount, {TEXT("/"), TEXT("/tmp"), 0, MS_BIND | MS_REC, 0}},
        {"remount the root writable", SYS_mount, {TEXT("none"), TEXT("/"), 0, MS_REMOUNT | MS_BIND, 0}},
        {"make mounts shared", SYS_mount, {TEXT("none"), TEXT("/"), 0, MS_SHARED | MS_REC, 0}},
        {"umount of the agent's directory", SYS_umount2, {TEXT("/run/cynode"), MNT_DETACH}},
        {"umount of /proc", SYS_umount2, {TEXT("/proc"), MNT_DETACH}},
        {"pivot_root", SYS_pivot_root, {TEXT("/tmp"), TEXT("/tmp")}},
        {"chroot", SYS_chroot, {TEXT("/tmp")}},
        {"fsopen", 430, {TEXT("tmpfs"), 0}},
        {"fsconfig", 431, {0, 0, 0, 0, 0}},
        {"fsmount", 432, {0, 0, 0}},
        {"fspick", 433, {-100UL, TEXT("/"), 0}},
        {"open_tree, cloned", 428, {-100UL, TEXT("/"), 1}},
        {"move_mount", 429, {-100UL, TEXT("/tmp"), -100UL, TEXT("/run"), 0}},
        {"mount_setattr", 442, {-100UL, TEXT("/"), 0, MEMORY, 32}},
        {"add_key", SYS_add_key, {TEXT("user"), TEXT("x"), TEXT("y"), 1, -2UL}},
        {"request_key", SYS_request_key, {TEXT("user"), TEXT("x"), 0, -2UL}},
        {"keyctl", SYS_keyctl, {0, -3UL, 1}},
        {"bpf", SYS_bpf, {0, MEMORY, 128}},
        {"perf_event_open", SYS_perf_event_open, {MEMORY, 0, -1UL, -1UL, 0}},
        {"io_uring_setup", 425, {8, MEMORY}},
        {"io_uring_enter", 426, {0, 1, 0, 0}},
        {"io_uring_register", 427, {0, 0, 0, 0}},
        {"io_setup", SYS_io_setup, {8, MEMORY}},
        {"userfaultfd", SYS_userfaultfd, {1}},
        {"fanotify_init", SYS_fanotify_init, {0, 0}},
        {"vmsplice", SYS_vmsplice, {1, MEMORY, 0, 0}},
        {"kexec_load", SYS_kexec_load, {0, 0, 0, 0}},
        {"kexec_file_load", SYS_kexec_file_load, {-1UL, -1UL, 0, 0, 0}},
        {"init_module", SYS_init_module, {MEMORY, 0, TEXT("")}},
        {"finit_module", SYS_finit_module, {-1UL, TEXT(""), 0}},
        {"delete_module", SYS_delete_module, {TEXT("cynode_none"), 0}},
        {"reboot", SYS_reboot, {0xfee1dead, 672274793, 0}},
        {"swapon", SYS_swapon, {TEXT("/tmp/none"), 0}},
        {"swapoff", SYS_swapoff, {TEXT("/tmp/none")}},
        {"sethostname", SYS_sethostname, {TEXT("evil"), 4}},
        {"setdomainname", SYS_setdomainname, {TEXT("evil"), 4}},
        {"settimeofday", SYS_settimeofday, {0, 0}},
        {"clock_settime", SYS_clock_settime, {0, MEMORY}},
        {"adjtimex", SYS_adjtimex, {MEMORY}},
        {"acct", SYS_acct, {0}},
        {"quotactl", SYS_quotactl, {0x800007 << 8, 0, 0, MEMORY}},
        {"syslog", SYS_syslog, {10, 0, 0}},
        {"kcmp", SYS_kcmp, {1, 1, 0, 0, 0}},
        {"name_to_handle_at", SYS_name_to_handle_at, {-100UL, TEXT("/workspace"), MEMORY, MEMORY + 2048, 0}},
        {"open_by_handle_at", SYS_open_by_handle_at, {-100UL, MEMORY, 0}},
        {"vhangup", SYS_vhangup, {0}},
        {"move_pages of process 1", SYS_move_pages, {1, 0, 0, 0, 0}},
        {"migrate_pages of process 1", SYS_migrate_pages, {1, 0, 0, 0}},
        {"process_madvise", 440, {-1UL, 0, 0, 0, 0}},
        {"personality, readable implies executable", SYS_personality, {0x0400000}},
        {"character device", SYS_mknodat, {-100UL, TEXT("/tmp/mem"), S_IFCHR | 0666, 0x0101}},
        {"character device, high bits set", SYS_mknodat, {-100UL, TEXT("/tmp/mem"), S_IFCHR | 0666 | HIGH, 0x0101}},
        {"character device in the workspace", SYS_mknodat, {-100UL, TEXT("/workspace/mem"), S_IFCHR | 0666, 0x0101}},
        {"block device", SYS_mknodat, {-100UL, TEXT("/tmp/disk"), S_IFBLK | 0666, 0x0800}},
        {"user 0 by setuid", SYS_setuid, {0}},
        {"user 0 by setresuid", SYS_setresuid, {0, 0, 0}},
        {"group 0 by setgid", SYS_setgid, {0}},
#ifdef __x86_64__
        {"iopl", SYS_iopl, {3}},
        {"ioperm", SYS_ioperm, {0, 1, 1}},
        {"modify_ldt", SYS_modify_ldt, {0, MEMORY, 16}},
        {"lookup_dcookie", SYS_lookup_dcookie, {0, MEMORY, 16}},
#endif
    };
    calls(list, sizeof list / sizeof *list);
}

/* --- network ---------------------------------------------------------------------------------------------------------- */

static const char *const family_names[] = {
    "unspec", "unix",  "inet",   "ax25",   "ipx",   "appletalk", "netrom", "bridge", "atmpvc",    "x25",   "inet6", "rose",
    "decnet", "netbeui", "security", "key", "netlink", "packet", "ash",   "econet", "atmsvc",    "rds",   "sna",   "irda",
    "pppox",  "wanpipe", "llc",    "ib",     "mpls",  "can",       "tipc",   "bluetooth", "iucv",   "rxrpc", "isdn",  "phonet",
    "ieee802154", "caif", "alg",  "nfc",    "vsock", "kcm",       "qipcrtr", "smc",   "xdp",       "mctp",
};

static int run_family(const void *argument) {
    unsigned long family = (unsigned long)argument;
    static const int types[] = {SOCK_STREAM, SOCK_DGRAM, SOCK_RAW, SOCK_SEQPACKET, SOCK_RDM};
    int error = 0;
    for (size_t index = 0; index < sizeof types / sizeof *types; index++) {
        if (syscall(SYS_socket, family, types[index], 0) >= 0)
            return 0;
        error = errno;
        int pair[2];
        if (syscall(SYS_socketpair, family, types[index], 0, pair) >= 0)
            return 0;
    }
    return error;
}

static int run_netlink(const void *protocol) { return verdict(syscall(SYS_socket, AF_NETLINK, SOCK_RAW, (unsigned long)protocol)); }

/* Asks the kernel for a new device: nlmsghdr, ifinfomsg, IFLA_LINKINFO { IFLA_INFO_KIND "dummy" }. */
static int run_new_device(const void *unused) {
    (void)unused;
    int fd = socket(AF_NETLINK, SOCK_RAW, 0);
    if (fd < 0)
        return errno;
    uint32_t message[13] = {52, 16 | (0x0005 | 0x0400) << 16, 1, 0, 0, 0, 0, 0, 20 | 18 << 16, 10 | 1 << 16, 0x6d6d7564, 0x79, 0};
    if (send(fd, message, sizeof message, 0) < 0)
        return errno;
    int32_t answer[64];
    if (recv(fd, answer, sizeof answer, 0) < 20)
        return EIO;
    /* NLMSG_ERROR carries the negative errno after the header; 0 is success. */
    return ((uint16_t *)answer)[2] == 2 ? -answer[4] : 0;
}

static int run_interface_down(const void *unused) {
    (void)unused;
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    struct { char name[16]; short flags; char rest[24]; } request = {"lo", 0, {0}};
    return verdict(ioctl(fd, 0x8914, &request));
}

struct target {
    int family, type, protocol;
};

static int run_socket(const void *argument) {
    const struct target *target = argument;
    return verdict(socket(target->family, target->type, target->protocol));
}

static int reach(const char *address, int port, int type) {
    struct sockaddr_in six_or_four = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    int is_four = inet_pton(AF_INET, address, &six_or_four.sin_addr) == 1;
    if (!is_four && inet_pton(AF_INET6, address, &six.sin6_addr) != 1)
        return EINVAL;
    const struct sockaddr *to = is_four ? (void *)&six_or_four : (void *)&six;
    socklen_t length = is_four ? sizeof six_or_four : sizeof six;
    int fd = socket(to->sa_family, type, 0);
    if (fd < 0)
        return errno;
    int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_BROADCAST, &on, sizeof on);
    if (type == SOCK_STREAM)
        return verdict(connect(fd, to, length));
    /* A datagram to a closed loopback port is accepted; the error follows with the next call. */
    if (connect(fd, to, length) < 0 || send(fd, "x", 1, 0) < 0)
        return errno;
    struct timeval patience = {0, 200000};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    char byte;
    return verdict(recv(fd, &byte, 1, 0));
}

static int run_reach(const void *argument) {
    char address[128];
    int port = 0;
    if (sscanf(argument, "%127s %d", address, &port) != 2)
        return EINVAL;
    int error = reach(address, port, SOCK_STREAM);
    return error == 0 ? 0 : reach(address, port, SOCK_DGRAM);
}

static int run_abstract(const void *name) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(name);
    memcpy(address.sun_path + 1, name, length);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    return verdict(connect(fd, (void *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length)));
}

static int run_unix(const void *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    return verdict(connect(fd, (void *)&address, sizeof address));
}

/* Arguments: "reach ADDRESS PORT", "abstract NAME", "unix PATH". */
static void network(int count, char **arguments) {
    char name[160];
    for (unsigned long family = 0; family < 64; family++) {
        if (family == AF_UNIX || family == AF_INET || family == AF_INET6 || family == AF_NETLINK)
            continue;
        snprintf(name, sizeof name, "socket of family %lu (%s)", family, family < sizeof family_names / sizeof *family_names ? family_names[family] : "unknown");
        attempt_(name, 1, run_family, (void *)family);
    }
    attempt_("vsock, high bits set", 1, run_family, (void *)(40 | HIGH));
    attempt_("packet, high bits set", 1, run_family, (void *)(17 | HIGH));
    for (unsigned long protocol = 1; protocol < 32; protocol++) {
        snprintf(name, sizeof name, "netlink protocol %lu", protocol);
        attempt_(name, 1, run_netlink, (void *)protocol);
    }
    attempt_("a new network device", 0, run_new_device, NULL);
    attempt_("loopback down", 1, run_interface_down, NULL);
    static const struct { const char *name; struct target target; } sockets[] = {
        {"raw IPv4", {AF_INET, SOCK_RAW, 255}},     {"raw IPv4, ICMP", {AF_INET, SOCK_RAW, 1}}, {"raw IPv4, TCP", {AF_INET, SOCK_RAW, 6}},
        {"raw IPv6", {AF_INET6, SOCK_RAW, 255}},    {"raw IPv6, ICMP", {AF_INET6, SOCK_RAW, 58}}, {"ping socket", {AF_INET, SOCK_DGRAM, 1}},
        {"ping socket, IPv6", {AF_INET6, SOCK_DGRAM, 58}}, {"SCTP", {AF_INET, SOCK_STREAM, 132}}, {"SCTP, packets", {AF_INET, SOCK_SEQPACKET, 132}},
        {"DCCP", {AF_INET, 6, 33}},                 {"DCCP by default protocol", {AF_INET, 6, 0}}, {"MPTCP", {AF_INET, SOCK_STREAM, 262}},
        {"UDP-Lite", {AF_INET, SOCK_DGRAM, 136}},   {"L2TP", {AF_INET, SOCK_DGRAM, 115}}, {"packet socket by type", {AF_INET, SOCK_PACKET, 0x300}},
    };
    for (size_t index = 0; index < sizeof sockets / sizeof *sockets; index++)
        attempt_(sockets[index].name, 1, run_socket, &sockets[index].target);
    for (int index = 0; index < count; index++) {
        char *rest = strchr(arguments[index], ' ');
        if (!rest)
            continue;
        *rest++ = 0;
        snprintf(name, sizeof name, "%s %.120s", arguments[index], rest);
        if (!strcmp(arguments[index], "reach"))
            attempt_(name, 0, run_reach, rest);
        else if (!strcmp(arguments[index], "abstract"))
            attempt_(name, 0, run_abstract, rest);
        else
            attempt_(name, 0, run_unix, rest);
    }
}

/* --- files ------------------------------------------------------------------------------------------------------------ */

static int run_read(const void *path) {
    int fd = open(path, O_RDONLY | O_NONBLOCK);
    char byte;
    if (fd < 0)
        return errno;
    ssize_t got = read(fd, &byte, 1);
    /* A masked file is empty. */
    return got < 0 ? errno : got == 0 ? ENODATA : 0;
}

static int run_list(const void *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY);
    if (fd < 0)
        return errno;
    long got = syscall(SYS_getdents64, fd, scratch, sizeof scratch);
    /* "." and ".." take 24 bytes each; a masked directory has nothing else. */
    return got < 0 ? errno : got <= 48 ? ENODATA : 0;
}

static int run_open_for_writing(const void *path) { return verdict(open(path, O_WRONLY | O_NONBLOCK)); }

static int run_create(const void *path) { return verdict(open(path, O_WRONLY | O_CREAT | O_EXCL, 0600)); }

static int run_mkdir(const void *path) { return verdict(mkdir(path, 0700)); }

static int run_unlink(const void *path) { return verdict(unlink(path)); }

static int run_rename(const void *path) { return verdict(rename(path, "/run/cynode/moved")); }

static int run_readlink(const void *path) { return verdict(readlink(path, scratch, sizeof scratch)); }

static int run_chdir(const void *path) { return verdict(chdir(path)); }

static int run_link(const void *path) { return verdict(link(path, "/workspace/linked")); }

static int run_chmod(const void *path) { return verdict(chmod(path, 04777)); }

static int run_lower_oom(const void *unused) {
    (void)unused;
    int fd = open("/proc/self/oom_score_adj", O_WRONLY);
    return verdict(write(fd, "-1000", 5));
}

static int look(const char *path, const struct stat *status, int kind, struct FTW *walk) {
    (void)walk;
    if (kind == FTW_F && S_ISREG(status->st_mode)) {
        int fd = open(path, O_WRONLY | O_NONBLOCK);
        if (fd >= 0) {
            fprintf(stderr, "writable: %s\n", path);
            return 1;
        }
    }
    return 0;
}

/* Reports whether any file below can be opened for writing. */
static int run_tree(const void *path) {
    struct stat status;
    if (stat(path, &status) < 0)
        return errno;
    int result = nftw(path, look, 32, FTW_PHYS | FTW_MOUNT);
    return result == 1 ? 0 : EROFS;
}

/* A descriptor beyond the three, or one that leads to a directory or a device. */
static int run_descriptors(const void *unused) {
    (void)unused;
    for (int fd = 0; fd < 1024; fd++) {
        struct stat status;
        if (fstat(fd, &status) == 0 && (fd > 2 || S_ISDIR(status.st_mode) || S_ISBLK(status.st_mode))) {
            fprintf(stderr, "descriptor %d, mode %o\n", fd, status.st_mode);
            return 0;
        }
    }
    return EBADF;
}

/* The root above the root. */
static int run_above_root(const void *unused) {
    (void)unused;
    struct stat root, above;
    if (stat("/", &root) < 0 || chdir("/") < 0 || stat("../../../..", &above) < 0)
        return errno;
    return root.st_ino == above.st_ino && root.st_dev == above.st_dev ? ENOENT : 0;
}

struct path {
    const char *what;
    int (*run)(const void *);
    const char *path;
};

static void files(void) {
    static const struct path list[] = {
        {"read", run_read, "/proc/1/environ"},
        {"read", run_read, "/proc/1/mem"},
        {"write", run_open_for_writing, "/proc/1/mem"},
        {"read", run_read, "/proc/1/maps"},
        {"read", run_read, "/proc/1/auxv"},
        {"read", run_read, "/proc/1/stack"},
        {"read", run_read, "/proc/1/syscall"},
        {"read", run_read, "/proc/1/io"},
        {"list", run_list, "/proc/1/fd"},
        {"list", run_list, "/proc/1/fdinfo"},
        {"list", run_list, "/proc/1/root"},
        {"list", run_list, "/proc/1/cwd"},
        {"list", run_list, "/proc/1/map_files"},
        {"readlink", run_readlink, "/proc/1/exe"},
        {"readlink", run_readlink, "/proc/1/ns/mnt"},
        {"write", run_open_for_writing, "/proc/1/exe"},
        {"write", run_open_for_writing, "/proc/1/oom_score_adj"},
        {"write", run_open_for_writing, "/proc/1/comm"},
        {"write", run_open_for_writing, "/proc/1/uid_map"},
        {"chdir", run_chdir, "/proc/1/root"},
        {"read", run_read, "/proc/kcore"},
        {"read", run_read, "/proc/kmsg"},
        {"read", run_read, "/proc/keys"},
        {"read", run_read, "/proc/timer_list"},
        {"read", run_read, "/proc/sched_debug"},
        {"list", run_list, "/proc/scsi"},
        {"list", run_list, "/proc/acpi"},
        {"list", run_list, "/sys/firmware"},
        {"write", run_open_for_writing, "/proc/sysrq-trigger"},
        {"write", run_open_for_writing, "/proc/sys/kernel/core_pattern"},
        {"write", run_open_for_writing, "/proc/sys/kernel/modprobe"},
        {"write", run_open_for_writing, "/proc/sys/kernel/hostname"},
        {"write", run_open_for_writing, "/proc/sys/vm/drop_caches"},
        {"write", run_open_for_writing, "/proc/sys/fs/binfmt_misc/register"},
        {"write", run_open_for_writing, "/sys/kernel/uevent_helper"},
        {"write", run_open_for_writing, "/sys/fs/cgroup/release_agent"},
        {"write", run_open_for_writing, "/sys/fs/cgroup/memory/release_agent"},
        {"write", run_open_for_writing, "/sys/fs/cgroup/memory/memory.limit_in_bytes"},
        {"write", run_open_for_writing, "/sys/fs/cgroup/pids/cgroup.procs"},
        {"write", run_open_for_writing, "/sys/fs/cgroup/cgroup.procs"},
        {"mkdir", run_mkdir, "/sys/fs/cgroup/evil"},
        {"mkdir", run_mkdir, "/sys/fs/cgroup/memory/evil"},
        {"write anything below", run_tree, "/sys"},
        {"write anything below", run_tree, "/sys/fs/cgroup"},
        {"write anything below", run_tree, "/proc/sys"},
        {"write anything below", run_tree, "/proc/bus"},
        {"write anything below", run_tree, "/proc/irq"},
        {"write anything below", run_tree, "/proc/fs"},
        {"write anything below", run_tree, "/etc"},
        {"write anything below", run_tree, "/run/cynode"},
        {"open", run_open_for_writing, "/dev/mem"},
        {"open", run_open_for_writing, "/dev/kmem"},
        {"open", run_open_for_writing, "/dev/port"},
        {"open", run_open_for_writing, "/dev/kmsg"},
        {"open", run_read, "/dev/sda"},
        {"open", run_read, "/dev/vda"},
        {"open", run_read, "/dev/nvme0n1"},
        {"open", run_read, "/dev/loop-control"},
        {"open", run_read, "/dev/loop0"},
        {"open", run_read, "/dev/dm-0"},
        {"open", run_open_for_writing, "/dev/fuse"},
        {"open", run_open_for_writing, "/dev/kvm"},
        {"open", run_open_for_writing, "/dev/net/tun"},
        {"open", run_open_for_writing, "/dev/vsock"},
        {"open", run_open_for_writing, "/dev/vhost-vsock"},
        {"open", run_open_for_writing, "/dev/vhost-net"},
        {"open", run_open_for_writing, "/dev/uinput"},
        {"open", run_open_for_writing, "/dev/tty0"},
        {"open", run_open_for_writing, "/dev/console"},
        {"open", run_open_for_writing, "/dev/dri/card0"},
        {"create", run_create, "/evil"},
        {"create", run_create, "/etc/evil"},
        {"create", run_create, "/dev/evil"},
        {"create", run_create, "/bin/evil"},
        {"create", run_create, "/run/cynode/evil.sock"},
        {"unlink", run_unlink, "/run/cynode/control.sock"},
        {"unlink", run_unlink, "/run/cynode/cynode-sba"},
        {"rename", run_rename, "/run/cynode/control.sock"},
        {"chmod", run_chmod, "/run/cynode/control.sock"},
        {"read", run_read, "/run/cynode/cynode-sba"},
        {"write", run_open_for_writing, "/run/cynode/cynode-sba"},
        {"hard link of", run_link, "/run/cynode/cynode-sba"},
        {"hard link of", run_link, "/run/cynode/control.sock"},
        {"hard link of", run_link, "/etc/passwd"},
        {"chmod", run_chmod, "/bin/busybox"},
    };
    char name[256];
    for (size_t index = 0; index < sizeof list / sizeof *list; index++) {
        snprintf(name, sizeof name, "%s %s", list[index].what, list[index].path);
        attempt_(name, 0, list[index].run, list[index].path);
    }
    attempt_("inherited descriptors", 0, run_descriptors, NULL);
    attempt_("a root above the root", 0, run_above_root, NULL);
    attempt_("exempt from the out-of-memory killer", 0, run_lower_oom, NULL);
}

/* --- taking all there is ---------------------------------------------------------------------------------------------- */

static void *idle(void *unused) {
    pause();
    return unused;
}

/* One more of a kind; false when there is none. */
static int take(const char *kind) {
    if (!strcmp(kind, "inotify"))
        return inotify_init() >= 0;
    if (!strcmp(kind, "terminals"))
        return open("/dev/ptmx", O_RDWR | O_NOCTTY) >= 0;
    if (!strcmp(kind, "descriptors"))
        return open("/dev/null", O_RDONLY) >= 0;
    if (!strcmp(kind, "pipes")) {
        int ends[2];
        if (pipe(ends) < 0)
            return 0;
        /* The largest possible size. */
        fcntl(ends[1], F_SETPIPE_SZ, 1 << 20);
        return 1;
    }
    if (!strcmp(kind, "timers")) {
        timer_t timer;
        return timer_create(CLOCK_MONOTONIC, NULL, &timer) == 0;
    }
    if (!strcmp(kind, "threads")) {
        pthread_t thread;
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, 1 << 16);
        int error = pthread_create(&thread, &attributes, idle, NULL);
        errno = error;
        return error == 0;
    }
    if (!strcmp(kind, "memory")) {
        char *page = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (page == MAP_FAILED)
            return 0;
        memset(page, 1, 1 << 20);
        return 1;
    }
    if (!strcmp(kind, "descriptors in flight")) {
        /* As many as fit into one message, in a separate socket that nobody reads. */
        int ends[2], flying[253];
        if (socketpair(AF_UNIX, SOCK_DGRAM, 0, ends) < 0)
            return 0;
        for (size_t index = 0; index < sizeof flying / sizeof *flying; index++)
            flying[index] = ends[0];
        char byte = 0, control[CMSG_SPACE(sizeof flying)];
        memset(control, 0, sizeof control);
        struct iovec data = {&byte, 1};
        struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof flying);
        memcpy(CMSG_DATA(header), flying, sizeof flying);
        return sendmsg(ends[1], &message, 0) >= 0;
    }
    if (!strcmp(kind, "queued signals")) {
        sigset_t all;
        sigfillset(&all);
        sigprocmask(SIG_BLOCK, &all, NULL);
        union sigval value = {0};
        return sigqueue(getpid(), SIGRTMIN, value) == 0;
    }
    errno = EINVAL;
    return 0;
}

/* In as many processes as possible, because most limits are per process. Ends when a process gets nothing. */
static int exhaust(const char *kind) {
    int ends[2];
    unsigned long total = 0;
    if (pipe(ends) < 0)
        return 1;
    for (int processes = 0; processes < 256; processes++) {
        pid_t child = fork();
        if (child < 0)
            break;
        if (child == 0) {
            unsigned long taken = 0;
            while (taken < 200000 && take(kind))
                taken++;
            if (write(ends[1], &taken, sizeof taken) < 0)
                _exit(1);
            pause();
            _exit(0);
        }
        unsigned long taken = 0;
        /* A child killed by the out-of-memory killer writes nothing: check its status as well. */
        for (;;) {
            fcntl(ends[0], F_SETFL, O_NONBLOCK);
            if (read(ends[0], &taken, sizeof taken) == sizeof taken || waitpid(child, NULL, WNOHANG) == child)
                break;
            usleep(1000);
        }
        total += taken;
        /* Threads count as processes, so the first child takes all of them. */
        if (taken < 2)
            break;
    }
    printf("full %lu\n", total);
    fflush(stdout);
    for (;;)
        pause();
}

static int listen_abstract(const char *name) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(name);
    memcpy(address.sun_path + 1, name, length);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(fd, (void *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length)) < 0 || listen(fd, 8) < 0)
        return 1;
    printf("listening\n");
    fflush(stdout);
    while (accept(fd, NULL, NULL) >= 0) {
        printf("somebody came\n");
        fflush(stdout);
    }
    return 0;
}

/* Connections that are all open at once, each with a forged frame length or a hello. */
static int control(int count) {
    int *sockets = calloc((size_t)count, sizeof *sockets), made = 0, turned_away = 0;
    static const char hello[] = "\x40\0\0\0\1{\"reply\":\"hello\",\"protocol\":1,\"version\":\"evil\",\"role\":\"watch\"}  ";
    static const char lie[] = "\xff\xff\xff\xff\1{";
    signal(SIGPIPE, SIG_IGN);
    for (; made < count; made++) {
        struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "/run/cynode/control.sock"};
        sockets[made] = socket(AF_UNIX, SOCK_STREAM, 0);
        if (sockets[made] < 0)
            break;
        struct timeval patience = {10, 0};
        setsockopt(sockets[made], SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
        setsockopt(sockets[made], SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
        if (connect(sockets[made], (void *)&address, sizeof address) < 0)
            perror("connect");
        ssize_t sent = made % 2 ? send(sockets[made], hello, sizeof hello - 1, 0) : send(sockets[made], lie, sizeof lie - 1, 0);
        (void)sent;
    }
    for (int index = 0; index < made; index++) {
        char byte;
        ssize_t got = recv(sockets[index], &byte, 1, 0);
        if (got == 0 || (got < 0 && errno == ECONNRESET))
            turned_away++;
    }
    printf("%d of %d turned away\n", turned_away, made);
    return 0;
}

static int signals(void) {
    int delivered = 0;
    for (int round = 0; round < 20; round++)
        for (int number = 1; number < 65; number++)
            delivered += kill(1, number) == 0;
    printf("%d signals\n", delivered);
    return 0;
}

static int fill(const char *directory, unsigned long count, unsigned long bytes) {
    unsigned long made = 0;
    char name[512];
    char *data = calloc(1, bytes + 1);
    int stopped = 0, below = -1;
    mkdir(directory, 0755);
    for (; made < count && !stopped; made++) {
        if (made % 1000 == 0) {
            close(below);
            snprintf(name, sizeof name, "%s/%lu", directory, made / 1000);
            if ((mkdir(name, 0755) < 0 && errno != EEXIST) || (below = open(name, O_RDONLY | O_DIRECTORY)) < 0) {
                stopped = errno;
                break;
            }
        }
        errno = 0;
        snprintf(name, sizeof name, "%lu", made);
        int fd = openat(below, name, O_WRONLY | O_CREAT | O_EXCL, 0644);
        if (fd < 0 || (bytes > 0 && write(fd, data, bytes) != (ssize_t)bytes)) {
            stopped = errno ? errno : ENOSPC;
            break;
        }
        close(fd);
    }
    printf("made %lu, errno %d\n", made, stopped);
    return 0;
}

static int deep(const char *directory, unsigned long levels) {
    unsigned long made = 0;
    if (chdir(directory) == 0)
        while (made < levels && mkdir("d", 0755) == 0 && chdir("d") == 0)
            made++;
    printf("%lu deep\n", made);
    return 0;
}

static int forks(void) {
    for (int number = 1; number < 65; number++)
        signal(number, SIG_IGN);
    printf("lit\n");
    fflush(stdout);
    for (;;)
        if (fork() == 0)
            setsid();
}

int main(int count, char **arguments) {
    const char *group = count > 1 ? arguments[1] : "";
    if (!strcmp(group, "kernel"))
        kernel();
    else if (!strcmp(group, "network"))
        network(count - 2, arguments + 2);
    else if (!strcmp(group, "files"))
        files();
    else if (!strcmp(group, "exhaust") && count == 3)
        return exhaust(arguments[2]);
    else if (!strcmp(group, "probe") && count == 3)
        return take(arguments[2]) ? 0 : errno;
    else if (!strcmp(group, "listen") && count == 3)
        return listen_abstract(arguments[2]);
    else if (!strcmp(group, "control") && count == 3)
        return control(atoi(arguments[2]));
    else if (!strcmp(group, "fill") && count == 5)
        return fill(arguments[2], strtoul(arguments[3], NULL, 10), strtoul(arguments[4], NULL, 10));
    else if (!strcmp(group, "deep") && count == 4)
        return deep(arguments[2], strtoul(arguments[3], NULL, 10));
    else if (!strcmp(group, "forks"))
        return forks();
    else if (!strcmp(group, "signals"))
        return signals();
    else
        return 64;
    printf("{\"name\":\"done\",\"outcome\":\"refused\"}\n");
    return 0;
}
