//! The parameters in the path and the query of a call.

use std::collections::HashMap;

use axum::extract::{FromRequestParts as _, Query, RawPathParams};
use cynode_api::{ErrorCode, ExecId};
use cynode_policy::Action;
use cynode_service::ApiError;
use http::request::Parts;

use super::policy_calls;

/// The total size of all paths that one call touches.
const MAX_PATHS_BYTES: usize = 16 * 1024 * 1024;

#[derive(Debug)]
pub(crate) struct Address {
    pub(crate) path: HashMap<String, String>,
    /// As far as it can be parsed; the handler parses it strictly.
    pub(crate) query: Vec<(String, String)>,
}

impl Address {
    pub(crate) async fn from_parts(parts: &mut Parts) -> Result<Self, ApiError> {
        let params = RawPathParams::from_request_parts(parts, &())
            .await
            .map_err(|error| ApiError::invalid(error.body_text()))?;
        let path: HashMap<String, String> = params
            .iter()
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        if let Some(text) = path
            .get("exec_id")
            .filter(|text| text.parse::<ExecId>().is_err())
        {
            return Err(ApiError::new(
                ErrorCode::ExecNotFound,
                format!(
                    "'{}' is not an id",
                    text.chars().take(100).collect::<String>()
                ),
            ));
        }
        let query = Query::<Vec<(String, String)>>::try_from_uri(&parts.uri)
            .map(|query| query.0)
            .unwrap_or_default();
        Ok(Self { path, query })
    }

    /// Every parameter with its name: the query first, then the path.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = (&String, &String)> {
        self.query
            .iter()
            .map(|(name, value)| (name, value))
            .chain(&self.path)
    }

    /// Where an uploaded file, archive or artifact goes.
    pub(crate) fn upload_path(&self, action: Action) -> String {
        match action {
            Action::ArtifactPut => self.path.get("path").cloned().unwrap_or_default(),
            Action::FileWrite | Action::FileImport => policy_calls::queried_path(&self.query),
            _ => String::new(),
        }
    }

    /// Refuses an archive whose paths would take too much memory once each is joined to the
    /// directory that it is unpacked into.
    pub(crate) fn check_path_bytes<'a>(
        &self,
        entries: impl Iterator<Item = &'a str>,
    ) -> Result<(), ApiError> {
        let directory = self
            .query
            .iter()
            .filter(|(name, _)| name.starts_with("path"))
            .map(|(_, value)| value.len() + 1)
            .sum::<usize>();
        let bytes = entries
            .map(|entry| entry.len().saturating_add(directory))
            .fold(0, usize::saturating_add);
        if bytes > MAX_PATHS_BYTES {
            return Err(ApiError::new(
                ErrorCode::TooLarge,
                format!("the paths of the archive exceed {MAX_PATHS_BYTES} bytes in total"),
            ));
        }
        Ok(())
    }
}
