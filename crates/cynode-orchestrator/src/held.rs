//! The secrets that must not enter a sandbox: this process's own, and every credential, of which
//! only keyed hashes are known. Changes reach every orchestrator within a second.

use std::{sync::Arc, time::Duration};

use cynode_policy::{HeldForm, HeldSecrets, Scanner};
use tokio_util::sync::CancellationToken;

use crate::{
    db::{self, Db},
    keys::Keys,
};

const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// What a refusal calls the value of a credential.
const CREDENTIAL: &str = "a credential of an egress role";

/// Keeps the scanner's held secrets as the database has them. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct HeldCredentials {
    keys: Keys,
    /// The process's own secrets.
    own: Arc<HeldSecrets>,
    scanner: Scanner,
    /// The revision that is in force. Locked while it changes, so that an older set never replaces
    /// a newer one.
    revision: Arc<tokio::sync::Mutex<Option<i64>>>,
}

impl HeldCredentials {
    pub(crate) fn new(keys: Keys, own: HeldSecrets, scanner: Scanner) -> Self {
        Self {
            keys,
            own: Arc::new(own),
            scanner,
            revision: Arc::default(),
        }
    }

    /// The encrypted hashes of a value; `None` if it is too short to be recognized.
    pub(crate) fn hashes(&self, secret: &str) -> Option<Vec<u8>> {
        let forms = self.own.forms(secret.as_bytes())?;
        let forms = serde_json::to_vec(&forms).unwrap_or_default();
        Some(self.keys.encrypt_held(forms))
    }

    /// Reloads the hashes if the database has others.
    pub(crate) async fn refresh(&self, db: &Db) -> Result<(), db::Error> {
        let mut known = self.revision.lock().await;
        if *known == Some(db.credential_revision().await?) {
            return Ok(());
        }
        let (revision, credentials) = db.held_credentials().await?;
        let mut held = HeldSecrets::clone(&self.own);
        for encrypted in &credentials {
            let forms: Option<Vec<HeldForm>> = self
                .keys
                .decrypt_held(encrypted)
                .and_then(|forms| serde_json::from_slice(&forms).ok());
            match forms {
                Some(forms) => held.add_forms(CREDENTIAL, forms),
                None => tracing::error!(
                    "A credential's hash can't be decrypted: its value is not recognized in input."
                ),
            }
        }
        self.scanner.hold(held);
        *known = Some(revision);
        Ok(())
    }

    /// Follows changes until the orchestrator stops.
    pub(crate) async fn follow(self, db: Db, stop: CancellationToken) {
        loop {
            if let Err(error) = self.refresh(&db).await {
                tracing::debug!(%error, "Reloading the hashes of credentials failed; the loaded ones stay in effect.");
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(POLL_INTERVAL) => {}
            }
        }
    }
}
