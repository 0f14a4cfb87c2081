//! How content that looks like a credential is treated: `orchestrator.secret_shapes`, tightened by
//! the preference `secrets.shapes` of a project.
//!
//! The settings are cached in memory, because every call with a body needs them. Changes reach
//! every orchestrator within about a second.

use std::{collections::HashMap, sync::Arc};

use cynode_api::ProjectId;
use cynode_policy::{ShapePolicy, ShapeSetting};
use parking_lot::RwLock;

use crate::db::{self, Db};

#[derive(Debug)]
pub(crate) struct ShapePolicies {
    system: ShapePolicy,
    projects: RwLock<Arc<HashMap<ProjectId, ShapePolicy>>>,
    /// Serializes refreshes, so that an older state never replaces a newer one.
    refresh_lock: tokio::sync::Mutex<()>,
}

impl ShapePolicies {
    pub(crate) async fn open(db: &Db, setting: &ShapeSetting) -> Result<Self, db::Error> {
        let policies = Self {
            system: setting.into(),
            projects: RwLock::default(),
            refresh_lock: tokio::sync::Mutex::default(),
        };
        policies.refresh(db).await?;
        Ok(policies)
    }

    /// The policy for calls in a project, or outside of any.
    pub(crate) fn for_project(&self, project: Option<ProjectId>) -> ShapePolicy {
        project
            .and_then(|project| self.projects.read().get(&project).copied())
            .unwrap_or(self.system)
    }

    /// Whether the operator has turned detection off entirely, so that records may contain shapes.
    pub(crate) fn is_off(&self) -> bool {
        self.system.is_off()
    }

    pub(crate) async fn refresh(&self, db: &Db) -> Result<(), db::Error> {
        let _guard = self.refresh_lock.lock().await;
        let settings = db.shape_settings().await?;
        let tightened = settings.iter().filter_map(|(project, value)| {
            let setting = serde_json::from_value::<ShapeSetting>(value.clone());
            if let Err(error) = &setting {
                tracing::warn!(
                    %project, %error,
                    "The project's secrets.shapes is invalid; the system's setting applies."
                );
            }
            Some((*project, self.system.tightened(&setting.ok()?)))
        });
        let tightened = Arc::new(tightened.collect());
        *self.projects.write() = tightened;
        Ok(())
    }
}
