//! Trees as tar archives, in both directions.

use std::{
    collections::BTreeMap,
    io::Read as _,
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::Path,
};

use anyhow::Result;
use cynode_tests::Answer;
use http::Method;
use serde_json::json;
use tar::{EntryType, Header};

use super::Sandbox;

impl Sandbox {
    async fn import(&self, path: &str, archive: impl Into<reqwest::Body>) -> Result<Answer> {
        Answer::of(
            self.http
                .request(
                    Method::POST,
                    &format!("/v1/worker/sessions/{}/import", self.id),
                )
                .query(&[("path", path)])
                .body(archive),
        )
        .await
    }
}

/// Kind, name, link target, content.
type Entry<'a> = (EntryType, &'a [u8], &'a [u8], &'a [u8]);

/// An entry with an unchecked name.
fn entry(
    archive: &mut tar::Builder<Vec<u8>>,
    kind: EntryType,
    name: &[u8],
    link: &[u8],
    content: &[u8],
) {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(0o6755);
    header.set_size(content.len() as u64);
    let old = header.as_old_mut();
    old.name[..name.len()].copy_from_slice(name);
    old.linkname[..link.len()].copy_from_slice(link);
    header.set_cksum();
    archive.append(&header, content).expect("written to memory");
}

fn archive(entries: &[Entry]) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for (kind, name, link, content) in entries {
        entry(&mut archive, *kind, name, link, content);
    }
    archive.into_inner().expect("written to memory")
}

#[tokio::test]
async fn a_tree_survives_export_and_import_with_links_modes_and_odd_names() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    sandbox
        .sh("mkdir -p src/empty src/closed/deep; cd src
            printf 'bytes\\0\\377' > binary; echo run > run; chmod 755 run; echo secret > private; chmod 600 private; : > nothing
            echo x > \"$(printf 'bad\\377name')\"; echo x > \"$(printf 'new\\nline')\"; echo x > 'sp ace \u{1f331}'
            long=$(head -c 120 /dev/zero | tr '\\0' n); mkdir -p $long/$long; echo deep > $long/$long/file
            ln -s run link; ln -s /nowhere/$long dangling; ln -s .. up; ln run hard; mkfifo pipe
            echo x > closed/deep/file; chmod 555 closed; touch -d @1000000000 run")
        .await?;
    let exported = sandbox
        .call("export", &json!({"format": "tar", "path": "src"}))
        .await?;
    assert_eq!(
        (exported.status, exported.header("content-type")),
        (200, "application/x-tar")
    );
    let mut found = BTreeMap::new();
    let mut reader = tar::Archive::new(&exported.body[..]);
    for entry in reader.entries()? {
        let mut entry = entry?;
        let mut content = Vec::new();
        entry.read_to_end(&mut content)?;
        let name = entry.path()?.into_owned().into_os_string().into_vec();
        found.insert(
            name,
            (
                entry.header().entry_type(),
                entry.link_name()?.map(std::borrow::Cow::into_owned),
                content,
            ),
        );
    }
    assert_eq!(found[&b"binary"[..]].2, b"bytes\0\xff");
    assert!(found.contains_key(&b"bad\xffname"[..]) && found.contains_key(&b"new\nline"[..]));
    assert_eq!(
        (found[&b"link"[..]].0, found[&b"link"[..]].1.as_deref()),
        (EntryType::Symlink, Some(Path::new("run")))
    );
    assert!(!found.contains_key(&b"pipe"[..]), "a FIFO was exported");
    assert!(found.keys().all(|name| {
        !name.starts_with(b"/")
            && Path::new(std::ffi::OsStr::from_bytes(name))
                .components()
                .all(|part| part != std::path::Component::ParentDir)
    }));

    sandbox.sh("rm src/pipe").await?;
    let before = sandbox.snapshot("src").await?;
    // Twice: existing files are replaced.
    for _ in 0..2 {
        assert_eq!(
            sandbox
                .import("made/copy", exported.body.clone())
                .await?
                .status,
            204
        );
        assert_eq!(sandbox.snapshot("made/copy").await?, before);
    }
    assert_eq!(
        sandbox.sh("stat -c '%Y %u' made/copy/run").await?,
        "1000000000 1000\n"
    );

    let whole = sandbox.call("export", &json!({"format": "tar"})).await?;
    assert_eq!(sandbox.import("/tmp/all", whole.body).await?.status, 204);
    assert_eq!(
        sandbox.snapshot("/tmp/all").await?,
        sandbox.snapshot("/workspace").await?
    );
    // An empty directory is exported too.
    let empty = sandbox
        .call("export", &json!({"format": "tar", "path": "src/empty"}))
        .await?;
    assert_eq!(
        sandbox.import("hollow/twice", empty.body).await?.status,
        204
    );
    assert_eq!(sandbox.sh("find hollow").await?, "hollow\nhollow/twice\n");
    for (body, expected) in [
        (json!({"format": "tar", "path": "none"}), (404, "not_found")),
        (
            json!({"format": "tar", "path": "src/run"}),
            (409, "not_a_directory"),
        ),
        (
            json!({"format": "tar", "base": "HEAD"}),
            (400, "invalid_request"),
        ),
        (
            json!({"format": "patch", "path": "src"}),
            (400, "invalid_request"),
        ),
        (json!({"format": "zip"}), (400, "invalid_request")),
        (json!({}), (400, "invalid_request")),
    ] {
        assert_eq!(
            sandbox.call("export", &body).await?.outcome(),
            (expected.0, expected.1.to_owned()),
            "{body}"
        );
    }
    Ok(())
}

#[tokio::test]
// invariant: no-host-paths
async fn no_archive_reaches_out_of_its_directory() -> Result<()> {
    use EntryType::{Block, Char, Directory, Fifo, Link, Regular, Symlink};
    let sandbox = Sandbox::new().await?;
    sandbox
        .sh("mkdir /tmp/outside; echo kept > /tmp/outside/file; echo kept > beside")
        .await?;
    let outside = sandbox.snapshot("/tmp").await?;
    let hostile: [&[Entry]; 14] = [
        &[(Regular, b"../evil", b"", b"x")],
        &[(Regular, b"a/../../evil", b"", b"x")],
        &[(Regular, b"/tmp/evil", b"", b"x")],
        &[(Regular, b"//tmp/evil", b"", b"x")],
        &[(Directory, b"../evil/", b"", b"")],
        &[
            (Symlink, b"up", b"..", b""),
            (Regular, b"up/evil", b"", b"x"),
        ],
        &[
            (Symlink, b"abs", b"/tmp/outside", b""),
            (Regular, b"abs/file", b"", b"x"),
        ],
        &[
            (Symlink, b"s1", b"..", b""),
            (Symlink, b"s2", b"s1/..", b""),
            (Directory, b"s2/tmp/evil", b"", b""),
        ],
        &[(Link, b"hard", b"../beside", b"")],
        &[(Link, b"hard", b"/tmp/outside/file", b"")],
        &[
            (Symlink, b"soft", b"/tmp/outside/file", b""),
            (Link, b"hard", b"soft", b""),
        ],
        &[(Char, b"device", b"", b"")],
        &[(Block, b"device", b"", b"")],
        &[(Fifo, b"pipe", b"", b"")],
    ];
    for entries in hostile {
        let answer = sandbox.import("into", archive(entries)).await?;
        assert_eq!(
            answer.outcome(),
            (400, "invalid_request".to_owned()),
            "{entries:?}"
        );
    }
    assert_eq!(
        sandbox
            .sh("ls -A; cat beside; stat -c %h beside; ls -A into")
            .await?,
        "beside\ninto\nkept\n1\nabs\ns1\ns2\nsoft\nup\n"
    );

    // A file replaces a link instead of writing through it, and loses its setuid bit.
    sandbox
        .sh("rm -r into; mkdir into; ln -s /tmp/outside/file into/name")
        .await?;
    assert_eq!(
        sandbox
            .import("into", archive(&[(Regular, b"name", b"", b"new")]))
            .await?
            .status,
        204
    );
    assert_eq!(
        sandbox
            .sh("cat into/name; stat -c ' %a %F' into/name")
            .await?,
        "new 755 regular file\n"
    );
    assert_eq!(sandbox.snapshot("/tmp").await?, outside);

    // Data that is not an archive creates nothing.
    let good = archive(&[(Regular, b"file", b"", &[b'x'; 2_000])]);
    for bytes in [&b""[..], b"not a tar archive", &[b'x'; 2_048], &good[..300]] {
        assert_eq!(
            sandbox.import("fresh", bytes.to_vec()).await?.outcome(),
            (400, "invalid_request".to_owned()),
            "{} bytes",
            bytes.len()
        );
    }
    assert_eq!(sandbox.sh("ls -A").await?, "beside\ninto\n");
    assert_eq!(
        sandbox
            .import("fresh", good[..1_000].to_vec())
            .await?
            .outcome(),
        (400, "invalid_request".to_owned())
    );
    assert_eq!(
        sandbox.import("/etc/x", good.clone()).await?.outcome(),
        (403, "permission_denied".to_owned())
    );
    assert_eq!(
        sandbox.import("beside", good).await?.outcome(),
        (409, "already_exists".to_owned())
    );
    Ok(())
}
