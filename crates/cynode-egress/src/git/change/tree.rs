//! Writes blobs, a tree and our commit.
//!
//! Invariant: everything goes from memory to objects, through a private index: no checkout, so no
//! filter, attribute, hook or file system has a say in what is committed.

use bytes::{BufMut as _, Bytes, BytesMut};

use super::{
    ChangeError,
    edits::{BaseFiles, EditedFile, Edits},
    objects::ObjectStore,
    output::{self, ObjectId, UnexpectedOutput},
};

/// Contents that go to git at once.
const MAX_BATCH_BYTES: usize = 16 * 1024 * 1024;

/// Writes the edits and returns the tree that they make of the base.
pub(super) async fn write(
    store: &ObjectStore<'_>,
    base: &BaseFiles,
    edits: &Edits,
    index: &str,
) -> Result<ObjectId, ChangeError> {
    let written: Vec<(&[u8], &EditedFile)> = edits
        .iter()
        .filter_map(|(path, file)| Some((path, file?)))
        .collect();
    let ids = blobs(store, written.iter().map(|(_, file)| &file.content)).await?;
    let mut info = BytesMut::new();
    let mut line = |mode: u32, id: ObjectId, path: &[u8]| {
        info.put_slice(format!("{mode:06o} {id}\t").as_bytes());
        info.put_slice(path);
        info.put_u8(0);
    };
    let null = base.commit.to_null();
    // First, so that a directory can take the place of a file.
    for (path, _) in edits.iter().filter(|(_, file)| file.is_none()) {
        line(0, null, path);
    }
    for ((path, file), id) in written.iter().zip(ids) {
        line(file.mode.bits(), id, path);
    }
    let commit = base.commit.to_string();
    let index = Some(index);
    store
        .run_small(&["read-tree", &commit], Bytes::new(), index)
        .await?;
    store
        .run_small(
            &["update-index", "-z", "--index-info"],
            info.freeze(),
            index,
        )
        .await?;
    let printed = store
        .run_small(&["write-tree"], Bytes::new(), index)
        .await?;
    Ok(output::single_id(&printed)?)
}

/// Writes blobs, many with each process.
async fn blobs<'a>(
    store: &ObjectStore<'_>,
    contents: impl Iterator<Item = &'a Bytes>,
) -> Result<Vec<ObjectId>, ChangeError> {
    let mut ids = Vec::new();
    let mut batch = BytesMut::new();
    let mut count = 0;
    for content in contents {
        count += 1;
        batch.put_slice(format!("blob\nmark :{count}\ndata {}\n", content.len()).as_bytes());
        batch.put_slice(content);
        batch.put_slice(format!("\nget-mark :{count}\n").as_bytes());
        if batch.len() >= MAX_BATCH_BYTES {
            ids.extend(import(store, batch.split(), count).await?);
            count = 0;
        }
    }
    if count > 0 {
        ids.extend(import(store, batch, count).await?);
    }
    Ok(ids)
}

async fn import(
    store: &ObjectStore<'_>,
    mut batch: BytesMut,
    count: usize,
) -> Result<Vec<ObjectId>, ChangeError> {
    batch.put_slice(b"done\n");
    let args = ["fast-import", "--quiet", "--done"];
    let printed = store.run_small(&args, batch.freeze(), None).await?;
    let ids = output::object_ids(&printed)?;
    if ids.len() != count {
        return Err(UnexpectedOutput("another number of objects than were written").into());
    }
    Ok(ids)
}

/// Writes a commit.
pub(super) async fn write_commit(
    store: &ObjectStore<'_>,
    text: String,
) -> Result<ObjectId, ChangeError> {
    let args = ["hash-object", "-t", "commit", "-w", "--stdin"];
    let printed = store.run_small(&args, Bytes::from(text), None).await?;
    Ok(output::single_id(&printed)?)
}
