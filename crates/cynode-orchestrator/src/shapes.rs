//! How shapes of credentials are treated: `orchestrator.secret_shapes`, tightened by the preference `secrets.shapes` of a project.
//!
//! Kept in memory, because every call that brings something asks. Every orchestrator has a change within about a second.

use std::{collections::HashMap, sync::Arc};

use cynode_api::ProjectId;
use cynode_policy::{ShapePolicy, ShapeSetting};
use cynode_service::ApiError;
use parking_lot::RwLock;

use crate::{Orchestrator, db::Db};

#[derive(Debug)]
pub(crate) struct ShapePolicies {
    system: ShapePolicy,
    projects: RwLock<Arc<HashMap<ProjectId, ShapePolicy>>>,
    /// Held while a change is taken over: an older state never replaces a newer one.
    turn: tokio::sync::Mutex<()>,
}

impl ShapePolicies {
    pub(crate) async fn open(db: &Db, setting: &ShapeSetting) -> Result<Self, ApiError> {
        let policies = Self {
            system: setting.into(),
            projects: RwLock::default(),
            turn: tokio::sync::Mutex::default(),
        };
        policies.refresh(db).await?;
        Ok(policies)
    }

    /// What holds for a call in a project, or in none.
    pub(crate) fn of(&self, project: Option<ProjectId>) -> ShapePolicy {
        project
            .and_then(|project| self.projects.read().get(&project).copied())
            .unwrap_or(self.system)
    }

    /// Whether records may hold shapes: only where an operator has turned all of it off.
    pub(crate) fn is_off(&self) -> bool {
        self.system.is_off()
    }

    pub(crate) async fn refresh(&self, db: &Db) -> Result<(), ApiError> {
        let _turn = self.turn.lock().await;
        let settings = db.shape_settings().await?;
        let tightened = settings.iter().filter_map(|(project, value)| {
            let setting = serde_json::from_value::<ShapeSetting>(value.clone());
            if let Err(error) = &setting {
                tracing::warn!(%project, %error, "A project's secrets.shapes can't be read; the system's setting holds there.");
            }
            Some((*project, self.system.tightened(&setting.ok()?)))
        });
        let tightened = Arc::new(tightened.collect());
        *self.projects.write() = tightened;
        Ok(())
    }
}

/// A reconciler's round: takes over what other orchestrators have written.
pub(crate) async fn round(orchestrator: &Orchestrator) -> Result<(), ApiError> {
    orchestrator.shapes.refresh(&orchestrator.db).await
}
