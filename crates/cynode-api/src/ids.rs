//! One type per kind of id, so that a session id can't be passed for a task id.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[derive(Serialize, Deserialize, ToSchema)]
        #[serde(transparent)]
        pub struct $name(Uuid);

        impl $name {
            /// A new time-ordered id (UUID v7).
            #[must_use]
            pub fn generate() -> Self {
                Self(Uuid::now_v7())
            }

            #[must_use]
            pub const fn from_uuid(uuid: Uuid) -> Self {
                Self(uuid)
            }

            #[must_use]
            pub const fn as_uuid(&self) -> &Uuid {
                &self.0
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }

        impl std::str::FromStr for $name {
            type Err = uuid::Error;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Uuid::parse_str(text).map(Self)
            }
        }
    };
}

id!(
    /// A session: a long-lived sandbox.
    SessionId
);
id!(
    /// The task that a session, job or artifact belongs to.
    TaskId
);
id!(
    /// One command run in a session.
    ExecId
);
id!(
    /// A workspace: the files of a session, which can outlive it.
    WorkspaceId
);
id!(
    /// A worker node.
    NodeId
);
id!(
    /// A job: one command, run once in a sandbox of its own.
    JobId
);
id!(
    /// A sandbox container. A resumed session gets a new one.
    SandboxId
);
id!(
    /// A project: a group of tasks.
    ProjectId
);
id!(
    /// A person with an account.
    UserId
);
id!(
    /// Users that share preferences.
    GroupId
);
id!(
    /// The id by which a token is listed and revoked; never the token itself.
    TokenId
);
id!(
    /// A sandbox image, with all its versions.
    ImageId
);
id!(
    /// One version of a sandbox image.
    ImageVersionId
);
id!(
    /// One version of a file that a task produced or received.
    ArtifactId
);
id!(
    /// One API call of the orchestrator, whose gate generates the id.
    CallId
);
id!(
    /// A credential of an upstream service, sealed to an egress role.
    CredentialId
);
id!(
    /// A registered git repository.
    RepositoryId
);
id!(
    /// A changeset on its way to a branch and a pull request.
    PromotionId
);
