use std::os::unix::fs::{PermissionsExt as _, symlink};

use cynode_api::ErrorCode;
use cynode_sba_proto::AgentError;

use super::{super::tests::*, *};

const ROOM: Room = Room {
    bytes: 1_000_000,
    nodes: 100_000,
};
const ALL: LineRange = LineRange {
    start: 1,
    end: None,
};

struct Job {
    files: TestWorkspace,
    workspace: Workspace,
}

impl Job {
    fn new() -> Self {
        let files = TestWorkspace::new();
        let workspace = Workspace::new(files.path("."));
        let workspace = Workspace::new(workspace.path().components().collect::<PathBuf>());
        Self { files, workspace }
    }

    fn run(&self, operation: Operation<'_>) -> Outcome<(Value, Option<Vec<u8>>)> {
        self.workspace
            .run(operation, ROOM)
            .map(|(output, content)| (output.value, content))
    }

    fn write(&self, path: &str, content: &str) -> Outcome<Value> {
        self.run(Operation::Write {
            path: path.as_bytes(),
            content: content.as_bytes(),
            mode: None,
        })
        .map(|(value, _)| value)
    }

    fn read(&self, path: &str) -> Outcome<Vec<u8>> {
        self.run(Operation::Read {
            path: path.as_bytes(),
            lines: ALL,
            max_bytes: 1_000,
        })
        .map(|(_, content)| content.expect("content"))
    }

    fn list(&self, path: &str, depth: u32) -> Outcome<Vec<String>> {
        self.run(Operation::List {
            path: path.as_bytes(),
            depth,
            max_entries: 1_000,
        })
        .map(|(value, _)| {
            let entries = value["entries"].as_array().expect("entries");
            let path = |entry: &Value| entry["path"].as_str().expect("a path").to_owned();
            entries.iter().map(path).collect()
        })
    }
}

/// A workspace with links of every kind, and a secret beside it.
fn with_links() -> Job {
    let job = Job::new();
    std::fs::write(job.files.outside("secret"), "secret").expect("written");
    std::fs::create_dir(job.files.outside("other")).expect("made");
    job.files.put("dir/file", "hello");
    for (target, name) in [
        ("dir", "inside"),
        ("../dir/file", "dir/roundabout"),
        ("file", "dir/link"),
        ("dir/new", "dangling"),
        ("../secret", "up"),
        ("../other", "updir"),
        ("loop", "loop"),
    ] {
        symlink(target, job.files.path(name)).expect("link");
    }
    symlink(job.files.outside("secret"), job.files.path("absolute")).expect("link");
    symlink(
        job.files.path("dir/file"),
        job.files.path("absolute-inside"),
    )
    .expect("link");
    job
}

#[test]
fn paths_that_lead_out_of_the_workspace_are_refused_by_every_step() {
    let job = with_links();
    let outside = job.files.outside("secret");
    for path in [
        "../secret",
        "dir/../../secret",
        outside.to_str().expect("text"),
        "/etc/passwd",
        "/workspace/../etc/passwd",
        "up",
        "absolute",
        "absolute-inside",
        "updir/new",
        "updir/../../secret",
    ] {
        for error in [
            refused(job.read(path).map(drop)),
            refused(job.write(path, "x").map(drop)),
        ] {
            assert_eq!(error.code, ErrorCode::PermissionDenied, "{path}: {error:?}");
            assert!(
                error.message.contains("workspace"),
                "{path}: {}",
                error.message
            );
        }
    }
    for path in ["..", "updir", "/", "/etc", "dir/../.."] {
        assert_eq!(
            code(job.list(path, 1)),
            ErrorCode::PermissionDenied,
            "{path}"
        );
    }
    let diff = "--- a/updir/new\n+++ b/updir/new\n@@ -0,0 +1 @@\n+x\n";
    let diff = Operation::Patch {
        diff: diff.as_bytes(),
    };
    assert_eq!(code(job.run(diff)), ErrorCode::PatchRejected);
    assert_eq!(std::fs::read(outside).expect("read"), b"secret");
    let other = std::fs::read_dir(job.files.outside("other")).expect("listed");
    assert_eq!(other.count(), 0);
}

#[test]
fn links_that_stay_inside_are_followed() {
    let job = with_links();
    for path in [
        "dir/file",
        "inside/file",
        "dir/link",
        "dir/roundabout",
        "inside/roundabout",
    ] {
        assert_eq!(job.read(path).expect("read"), b"hello", "{path}");
        job.write(path, "hello").expect("written");
    }
    job.write("dangling", "made").expect("written");
    assert_eq!(job.files.get("dir/new"), b"made");
    for link in ["dir/link", "dir/roundabout", "dangling"] {
        let stat = std::fs::symlink_metadata(job.files.path(link)).expect("stat");
        assert!(stat.is_symlink(), "{link}");
    }
    assert_eq!(code(job.write("loop", "x")), ErrorCode::InvalidRequest);
    assert_eq!(job.list("inside", 1).expect("listed").len(), 4);
}

#[test]
fn the_workspace_may_be_named_by_its_absolute_path() {
    let job = with_links();
    let own = job.files.path("dir/file");
    for path in [
        "/workspace/dir/file",
        "/workspace//dir/./file",
        own.to_str().expect("text"),
    ] {
        assert_eq!(job.read(path).expect("read"), b"hello", "{path}");
    }
    for path in ["/workspace", "/workspace/", ".", "./"] {
        let listed = job.list(path, 1).expect("listed");
        assert_eq!(listed[0], "absolute", "{path}");
    }
    assert_eq!(
        job.list("/workspace/dir", 1).expect("listed")[0],
        "dir/file"
    );
    // No prefix of a name.
    assert_eq!(
        code(job.read("/workspaces/file")),
        ErrorCode::PermissionDenied
    );
}

#[test]
fn a_write_creates_parents_keeps_the_mode_and_replaces_only_files() {
    let job = Job::new();
    let output = job.write("a/b/file", "hello").expect("written");
    assert_eq!(output, json!({ "sha256": HELLO, "size": 5 }));
    let mode = |path: &str| {
        let stat = std::fs::metadata(job.files.path(path)).expect("stat");
        stat.permissions().mode() & 0o7777
    };
    assert_eq!((mode("a/b/file"), mode("a/b")), (0o644, 0o755));
    let script = Operation::Write {
        path: b"a/b/file",
        content: b"new",
        mode: Some(0o755),
    };
    job.run(script).expect("written");
    job.write("a/b/file", "newer").expect("written");
    assert_eq!(
        (mode("a/b/file"), job.files.get("a/b/file")),
        (0o755, b"newer".to_vec())
    );
    assert_eq!(job.files.names("a/b"), ["file"]);
    job.files.fifo("fifo");
    for path in ["a", "a/", "a/b/file/", ".", "/workspace", "fifo"] {
        assert_eq!(code(job.write(path, "x")), ErrorCode::NotAFile, "{path}");
    }
    assert_eq!(code(job.write("a/b/file/x", "x")), ErrorCode::NotADirectory);
}

#[test]
fn lines_are_read_and_the_hash_is_that_of_the_whole_file() {
    let job = Job::new();
    job.files.put("file", "one\ntwo\nthree\nfour");
    let read = |start, end, max_bytes| {
        let operation = Operation::Read {
            path: b"file",
            lines: LineRange { start, end },
            max_bytes,
        };
        let (value, content) = job.run(operation).expect("read");
        let content = String::from_utf8(content.expect("content")).expect("text");
        (content, value["truncated"] == true, value["size"].clone())
    };
    assert_eq!(
        read(2, Some(3), 100),
        ("two\nthree\n".to_owned(), false, json!(18))
    );
    assert_eq!(read(4, None, 100).0, "four");
    assert_eq!(read(9, None, 100), (String::new(), false, json!(18)));
    assert_eq!(read(2, None, 5), ("two\nt".to_owned(), true, json!(18)));
    job.files.put("hello", "hello");
    let (value, _) = job
        .run(Operation::Read {
            path: b"hello",
            lines: LineRange {
                start: 5,
                end: None,
            },
            max_bytes: 1,
        })
        .expect("read");
    assert_eq!(
        value,
        json!({ "path": "hello", "size": 5, "sha256": HELLO, "truncated": false })
    );
    for path in [".", "hello/", "none"] {
        let expected = if path == "none" {
            ErrorCode::NotFound
        } else {
            ErrorCode::NotAFile
        };
        assert_eq!(code(job.read(path)), expected, "{path}");
    }
    job.files.fifo("fifo");
    assert_eq!(code(job.read("fifo")), ErrorCode::NotAFile);
}

#[test]
fn a_huge_file_is_read_only_as_far_as_asked() {
    let job = Job::new();
    job.files.put("huge", "start\n");
    std::fs::OpenOptions::new()
        .write(true)
        .open(job.files.path("huge"))
        .and_then(|file| file.set_len(1 << 40))
        .expect("sparse");
    let operation = Operation::Read {
        path: b"huge",
        lines: LineRange {
            start: 1,
            end: Some(1),
        },
        max_bytes: 100,
    };
    let (value, content) = job.run(operation).expect("read");
    assert_eq!(content.expect("content"), b"start\n");
    assert_eq!(
        (&value["sha256"], &value["size"]),
        (&Value::Null, &json!(1_u64 << 40))
    );
}

#[test]
fn a_tree_is_listed_in_order_with_hidden_names_and_links_but_not_inside_git() {
    let job = Job::new();
    for path in ["b", "a/x", ".hidden", ".git/objects/1", "sub/.git/config"] {
        job.files.put(path, "");
    }
    symlink("a", job.files.path("link")).expect("link");
    let all = [
        ".git", ".hidden", "a", "a/x", "b", "link", "sub", "sub/.git",
    ];
    assert_eq!(job.list(".", 64).expect("listed"), all);
    assert_eq!(
        job.list(".git", 64).expect("listed"),
        [".git/objects", ".git/objects/1"]
    );
    assert_eq!(job.list("a/x", 1).expect("listed"), ["a/x"]);
    assert_eq!(code(job.list("none", 1)), ErrorCode::NotFound);
    let (value, _) = job
        .run(Operation::List {
            path: b".",
            depth: 64,
            max_entries: 6,
        })
        .expect("listed");
    assert_eq!(value["truncated"], true);
    assert_eq!(value["entries"][5]["target"], "a");
}

#[test]
fn what_is_returned_fits_into_the_room_that_is_left() {
    let job = Job::new();
    for number in 0..100 {
        job.files.put(&format!("{number:03}"), "");
    }
    let list = Operation::List {
        path: b".",
        depth: 1,
        max_entries: 100,
    };
    for (bytes, nodes, least) in [(4_000, 100_000, 10), (1_000_000, 150, 10), (1, 0, 0)] {
        let room = Room { bytes, nodes };
        let (output, _) = job.workspace.run(list, room).expect("listed");
        assert!(output.truncated, "{room:?}");
        let count = output.value["entries"].as_array().expect("entries").len();
        assert!((least..100).contains(&count), "{room:?}: {count}");
        let text = output.value["entries"].to_string();
        assert!(
            count == 0 || text.len() <= bytes,
            "{room:?}: {}",
            text.len()
        );
        assert!(
            count_nodes(&output.value["entries"]) <= nodes + 1,
            "{room:?}"
        );
    }
    let diff = (0..50)
        .map(|number| format!("--- /dev/null\n+++ b/new{number}\n@@ -0,0 +1 @@\n+x\n"))
        .collect::<Vec<_>>()
        .concat();
    let patch = Operation::Patch {
        diff: diff.as_bytes(),
    };
    let room = Room {
        bytes: 2_000,
        nodes: 100_000,
    };
    let (output, _) = job.workspace.run(patch, room).expect("applied");
    let count = output.value["files"].as_array().expect("files").len();
    assert!(output.truncated && (5..50).contains(&count), "{count}");
    assert_eq!(job.files.get("new49"), b"x\n");
}

#[test]
fn a_diff_is_applied_whole_or_not_at_all_and_names_what_it_changed() {
    let job = Job::new();
    job.files.put("file", "one\ntwo\n");
    let apply = |diff: &str| {
        job.run(Operation::Patch {
            diff: diff.as_bytes(),
        })
    };
    let bad = "--- a/file\n+++ b/file\n@@ -1 +1 @@\n-one\n+1\n--- a/none\n+++ b/none\n@@ -1 +1 @@\n-x\n+y\n";
    let error: AgentError = refused(apply(bad));
    assert_eq!(
        (error.code, error.rejects.len()),
        (ErrorCode::PatchRejected, 1)
    );
    assert_eq!(job.files.get("file"), b"one\ntwo\n");
    let (value, _) =
        apply("--- a/file\n+++ b/file\n@@ -1,2 +1,2 @@\n-one\n+1\n two\n").expect("applied");
    assert_eq!(value["files"][0]["path"], "file");
    assert_eq!(value["files"][0]["operation"], "modify");
    assert_eq!(job.files.get("file"), b"1\ntwo\n");
    let outside = "--- a/../secret\n+++ b/../secret\n@@ -0,0 +1 @@\n+x\n";
    assert_eq!(refused(apply(outside)).rejects.len(), 1);
}

/// A thread keeps swapping a directory with a link that leads out, and a file with another one.
#[test]
fn a_write_that_races_with_links_never_leaves_the_workspace() {
    let job = Job::new();
    std::fs::create_dir(job.files.outside("other")).expect("made");
    std::fs::write(job.files.outside("secret"), "secret").expect("written");
    job.files.put("dir/sub/file", "");
    symlink("../other", job.files.path("evil")).expect("link");
    let stop = std::sync::atomic::AtomicBool::new(false);
    let swap = |one: &str, other: &str| {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        let (one, other) = (job.files.path(one), job.files.path(other));
        let _missing = renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE);
    };
    let (mut written, mut refused) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                swap("dir", "evil");
                let file = job.files.path("dir/sub/file");
                if std::fs::remove_file(&file).is_ok() {
                    drop(symlink("../../../secret", &file));
                }
                swap("dir", "evil");
                std::thread::yield_now();
            }
        });
        let until = std::time::Instant::now() + std::time::Duration::from_secs(3);
        while std::time::Instant::now() < until {
            for path in ["dir/sub/file", "dir/new/file", "evil/file"] {
                match job.write(path, "x") {
                    Ok(_) => written += 1,
                    Err(_) => refused += 1,
                }
                if let Ok(content) = job.read(path) {
                    assert_ne!(content, b"secret", "{path}");
                }
            }
            for entry in job.list(".", 64).unwrap_or_default() {
                assert!(!entry.contains("outside"), "{entry}");
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert!(
        written > 100 && refused > 100,
        "{written} written, {refused} refused"
    );
    assert_eq!(
        std::fs::read(job.files.outside("secret")).expect("read"),
        b"secret"
    );
    let other = std::fs::read_dir(job.files.outside("other")).expect("listed");
    assert_eq!(other.count(), 0);
}
