//! The files of a job on the node besides its record: specification, journal of steps, result and
//! artifacts. They are kept until the job is acknowledged.
//!
//! None of them is cached in memory: a node has many jobs, and a specification or result can have
//! tens of megabytes.

use std::{
    io,
    path::{Path, PathBuf},
};

use cynode_api::sba::{JobSpec, ResultStatus};
use cynode_service::files;
use serde::Deserialize;

use super::denials::StepDenial;

#[derive(Clone, Debug)]
pub(crate) struct JobFiles {
    directory: PathBuf,
}

/// The fields of a stored result that decide the state of its job.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct Verdict {
    pub(super) status: ResultStatus,
    pub(super) failure_code: Option<String>,
    pub(super) failure_message: Option<String>,
}

impl JobFiles {
    pub(super) const fn new(directory: PathBuf) -> Self {
        Self { directory }
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The journal of the job's steps.
    pub(super) fn steps(&self) -> PathBuf {
        self.directory.join("steps")
    }

    /// The directory of artifacts. Each file is named by its index in the list.
    pub(super) fn artifacts(&self) -> PathBuf {
        self.directory.join("artifacts")
    }

    /// The list of artifacts. It exists only when all of them are complete.
    pub(super) fn artifact_list(&self) -> PathBuf {
        self.directory.join("artifacts.json")
    }

    fn specification_path(&self) -> PathBuf {
        self.directory.join("job.json")
    }

    fn result_path(&self) -> PathBuf {
        self.directory.join("result.json")
    }

    /// Stores the specification.
    pub(super) fn write_specification(&self, job: &JobSpec) -> io::Result<()> {
        fs_err::create_dir_all(&self.directory)?;
        files::replace(&self.specification_path(), &serde_json::to_vec(job)?)
    }

    /// The JSON of the specification.
    pub(super) fn specification(&self) -> io::Result<Vec<u8>> {
        fs_err::read(self.specification_path())
    }

    fn reported_path(&self) -> PathBuf {
        self.directory.join("reported.json")
    }

    /// Stores the result that the job's own runner reported by the callback.
    pub(super) fn write_reported(&self, json: &[u8]) -> io::Result<()> {
        files::replace(&self.reported_path(), json)
    }

    /// The JSON of the result that the job's own runner reported.
    pub(super) fn reported(&self) -> io::Result<Option<Vec<u8>>> {
        if_found(fs_err::read(self.reported_path()))
    }

    fn denial_path(&self) -> PathBuf {
        self.directory.join("denial.json")
    }

    /// Stores the first denial of the step that runs.
    pub(super) fn write_denial(&self, denial: &StepDenial) -> io::Result<()> {
        files::replace(&self.denial_path(), &serde_json::to_vec(denial)?)
    }

    /// The last denial that was stored.
    pub(super) fn denial(&self) -> io::Result<Option<StepDenial>> {
        let Some(json) = if_found(fs_err::read(self.denial_path()))? else {
            return Ok(None);
        };
        Ok(Some(serde_json::from_slice(&json)?))
    }

    pub(super) fn write_result(&self, json: &[u8]) -> io::Result<()> {
        fs_err::create_dir_all(&self.directory)?;
        files::replace(&self.result_path(), json)
    }

    /// The JSON of the stored result, if there is one.
    pub(super) fn result(&self) -> io::Result<Option<Vec<u8>>> {
        if_found(fs_err::read(self.result_path()))
    }

    /// Reads the verdict of the stored result.
    pub(super) fn verdict(&self) -> io::Result<Verdict> {
        let json = self.result()?.ok_or(io::ErrorKind::NotFound)?;
        Ok(serde_json::from_slice(&json)?)
    }

    /// The JSON of the list of artifacts, if they are complete.
    pub(super) fn read_artifact_list(&self) -> io::Result<Option<Vec<u8>>> {
        if_found(fs_err::read(self.artifact_list()))
    }
}

fn if_found<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
