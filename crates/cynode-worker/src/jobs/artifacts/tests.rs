use std::path::Path;

use super::*;

fn opened(path: &Path) -> OwnedFd {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).expect("opens")
}

fn job() -> (tempfile::TempDir, JobFiles, PathBuf) {
    let directory = tempfile::tempdir().expect("a directory");
    let files = JobFiles::new(directory.path().join("kept"));
    let artifacts = directory.path().join("job/artifacts");
    fs_err::create_dir_all(&artifacts).expect("made");
    (directory, files, artifacts)
}

fn put(artifacts: &Path, path: &str, content: &[u8]) {
    let path = artifacts.join(path);
    fs_err::create_dir_all(path.parent().expect("a parent")).expect("made");
    fs_err::write(path, content).expect("written");
}

fn taken(artifacts: &Path, files: &JobFiles) -> ArtifactList {
    let job = opened(artifacts.parent().expect("a parent"));
    take_from_disk(&job, files).expect("taken")
}

#[test]
// invariant: no-host-paths
fn artifacts_are_regular_files_and_no_link_leads_out() {
    let (directory, files, artifacts) = job();
    put(directory.path(), "outside/secret", b"secret");
    put(&artifacts, "b", b"two");
    put(&artifacts, "a/deep", b"one");
    put(&artifacts, "new\nline", b"odd");
    let outside = directory.path().join("outside");
    let link = |to: &Path, name: &str| {
        fs_err::os::unix::fs::symlink(to, artifacts.join(name)).expect("linked");
    };
    link(&outside, "directory");
    link(&outside.join("secret"), "file");
    link(Path::new("b"), "inner");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        artifacts.join("pipe"),
        Kind::Fifo,
        Mode::RUSR,
        0,
    )
    .expect("a pipe");

    let list = taken(&artifacts, &files);
    let paths: Vec<&str> = list
        .artifacts
        .iter()
        .map(|kept| kept.path.as_str())
        .collect();
    assert_eq!((paths, list.omitted), (vec!["a/deep", "b"], 1));
    let (kept, mut file) = open(&files, "b").expect("readable").expect("kept");
    let mut content = String::new();
    file.read_to_string(&mut content).expect("read");
    assert_eq!((content.as_str(), kept.size), ("two", 3));
    assert_eq!(kept.sha256, hex::encode(Sha256::digest("two")));
    assert!(open(&files, "file").expect("readable").is_none());
    assert_eq!(ArtifactList::read(&files).expect("readable"), Some(list));
}

#[test]
fn a_link_in_place_of_the_directory_has_no_artifacts() {
    let (directory, files, artifacts) = job();
    put(directory.path(), "outside/secret", b"secret");
    fs_err::remove_dir(&artifacts).expect("removed");
    fs_err::os::unix::fs::symlink(directory.path().join("outside"), &artifacts).expect("linked");
    assert_eq!(taken(&artifacts, &files), ArtifactList::default());
    fs_err::remove_file(&artifacts).expect("removed");
    assert_eq!(taken(&artifacts, &files), ArtifactList::default());
}

#[test]
fn a_collection_that_was_interrupted_starts_over() {
    let (_directory, files, artifacts) = job();
    put(&artifacts, "kept", b"content");
    let staged = files.artifacts().with_extension("new");
    for leftover in [&staged, &files.artifacts()] {
        fs_err::create_dir_all(leftover).expect("made");
        fs_err::write(leftover.join("0"), "an earlier attempt").expect("written");
        fs_err::write(leftover.join("7"), "an earlier attempt").expect("written");
    }
    let list = taken(&artifacts, &files);
    assert_eq!((list.artifacts.len(), list.omitted), (1, 0));
    let names: Vec<_> = fs_err::read_dir(files.artifacts())
        .expect("listed")
        .map(|entry| entry.expect("an entry").file_name())
        .collect();
    assert_eq!(names, ["0"]);
    assert!(!staged.exists());
}

#[test]
fn artifacts_beyond_the_limits_are_counted() {
    let (_directory, files, artifacts) = job();
    for number in 0..=MAX_ARTIFACTS {
        put(&artifacts, &format!("{number:04}"), b"x");
    }
    let huge = fs_err::File::create(artifacts.join("00huge")).expect("made");
    huge.set_len(MAX_TOTAL_BYTES + 1).expect("sparse");
    let long = "n".repeat(200);
    put(&artifacts, &[long.as_str(); 5].join("/"), b"x");
    let list = taken(&artifacts, &files);
    assert_eq!((list.artifacts.len(), list.omitted), (MAX_ARTIFACTS, 3));
}
