//! The wire types of CyNode: typed ids, requests, responses and problem documents.
//!
//! This crate does no I/O. Requests reject unknown fields, so that a misspelt option is an error;
//! responses tolerate them, so that a newer worker can add fields.
#![forbid(unsafe_code)]

mod artifact;
mod audit;
mod call;
mod credential;
pub mod document;
mod egress;
mod egress_audit;
mod encoding;
mod event;
mod exec;
mod files;
mod flagged;
mod identity;
mod ids;
mod image;
mod job;
mod node;
mod node_audit;
mod policy;
mod problem;
mod promotion;
mod repository;
pub mod sba;
mod session;
mod setting;
mod work;

pub use artifact::{Artifact, artifact_limits};
pub use audit::{
    AUDIT_VERSION, AuditBody, AuditCheckpoints, AuditDecision, AuditKind, AuditPage, AuditProblem,
    AuditRecord, AuditResult, AuditSubject, AuditVerdict, AuditVerifyLine, MAX_AUDIT_PROBLEMS,
};
pub use call::{
    CALL_HEADER, Call, CallState, ExecOutcome, FileChange, FileChanges, RESULT_HEADER,
    SessionOutcome, SignalOutcome, StdinField, StdinOutcome, ascii_json, call_limits,
};
pub use credential::{
    Credential, CredentialCreate, CredentialRotate, EgressRole, credential_limits,
};
pub use egress::{
    CredentialPlaintext, EgressCall, EgressInfo, EgressPolicy, EgressPrincipal, EgressState,
    GitCommit, GitCommitted, GitPull, GitPulled, GitPush, GitPushed, GitResolve, GitResolved,
    GitSeed, SEED_NOTES_HEADER, SealedCredential, SeedNotes, egress_limits,
};
pub use egress_audit::{
    EGRESS_GIT_ACTIONS, EGRESS_SUBJECT, EgressAuditAck, EgressAuditBatch, EgressAuditVerdict,
    egress_audit_limits,
};
pub use encoding::{Base64Bytes, encode_streams};
pub use event::{Event, EventPage, event_limits};
pub use exec::{
    ByteCounts, Chunk, Exec, ExecAccepted, ExecExit, ExecForm, ExecRequest, ExecResult, ExecState,
    ExecVia, OutputPage, OutputQuery, SignalExec, SignalName, SignalScope, SignalSession,
    StdinWrite, Stream, StreamEvent, StreamHashes, Truncated, exec_form, exec_form_frame,
    exec_limits, form_frame,
};
pub use files::{
    ENCODED_PATCH, EditRequest, ExportFormat, ExportRequest, FileEdited, FileEntry, FileEvent,
    FileEventKind, FileType, FileWritten, ListRequest, ListResult, MkdirRequest, MoveRequest,
    PatchOperation, PatchReject, PatchRepair, PatchRequest, PatchResult, PatchedFile, SearchMatch,
    SearchRequest, SearchResult, file_limits, json_text_bytes,
};
pub use flagged::{FlaggedFile, Flags, ImportResult, flagged_limits};
pub use identity::{
    DEFAULT_TOKEN_SECONDS, Group, GroupCreate, MAX_TOKEN_SECONDS, TOKEN_PREFIX, Token, TokenCreate,
    TokenCreated, TokenKind, TokenRenew, User, UserCreate,
};
pub use ids::{
    ArtifactId, CallId, CredentialId, ExecId, GroupId, ImageId, ImageVersionId, JobId, NodeId,
    ProjectId, PromotionId, RepositoryId, SandboxId, SessionId, TaskId, TokenId, UserId,
    WorkspaceId,
};
pub use image::{Image, ImageCreate, ImagePatch, ImageState, ImageVersion, LocalImages};
pub use job::{
    Job, JobAck, JobCreate, JobError, JobOutput, JobProgress, JobRun, JobSandbox, JobState,
    JobStop, Reporter, Retry, job_limits,
};
pub use node::{
    Capability, Excess, Heartbeat, HeartbeatAnswer, LargestLimits, LocalImage, ModelServerKind,
    NewTokens, Node, NodeConfig, NodeDrain, NodeInference, NodeKeyCreate, NodeKeyCreated,
    NodeRegister, NodeRegistered, NodeState,
};
pub use node_audit::{
    NODE_ACTIONS, NODE_REFUSED_ACTION, NODE_STREAM_ACTION, NodeAuditAnswer, NodeAuditBatch,
    NodeAuditRecord, NodeAuditRefusal, node_audit_limits,
};
pub use policy::{Policy, PolicyPut, PolicyRule, PolicyTest, PolicyVerdict};
pub use problem::{ErrorCode, Problem};
pub use promotion::{
    ChangesetFormat, PromotedFile, Promotion, PromotionCheck, PromotionCreate, PromotionDecision,
    PromotionError, PromotionStage, PromotionState, PromotionVerdict, promotion_limits,
};
pub use repository::{
    AllowedAddress, ForgeKind, Repository, RepositoryCheck, RepositoryCreate, RepositoryRules,
    is_git_reference, is_repository_name, repository_limits,
};
pub use session::{
    Limits, LimitsRequest, NetworkPolicy, Page, Session, SessionCreate, SessionEnd, SessionPatch,
    SessionState, Unenforced, UserSessionCreate, WorkspaceDisposal, WorkspaceRef, is_session_name,
    session_limits,
};
pub use setting::{
    ALLOW_PM_IMAGES, ALLOWED_MODELS, DEFAULT_IMAGE_KEY, KEYS, Key, Preference, PreferenceScope,
    QUOTA_ARTIFACT_BYTES, QUOTA_CPU_SECONDS, QUOTA_SANDBOX_CPUS, QUOTA_SANDBOX_DISK_BYTES,
    QUOTA_SANDBOX_MEMORY_BYTES, QUOTA_SANDBOX_NOFILE, QUOTA_SANDBOX_PIDS, QUOTA_SANDBOXES,
    SECRET_SHAPES, Setting, ValueKind, ValuePut, is_model_name,
};
pub use work::{
    Project, ProjectCreate, ProjectPatch, Task, TaskCreate, TaskPatch, TaskStatus, text_limits,
};

/// The version in the bodies of the Worker API.
pub const API_VERSION: u32 = 1;

/// Image label that marks an image as fit for sessions.
pub const LABEL_AGENT_COMPATIBLE: &str = "io.cynodeai.sandbox.agent-compatible";
/// Image label for the purposes of an image.
pub const LABEL_PURPOSE: &str = "io.cynodeai.sandbox.purpose";
/// Container label on every sandbox.
pub const LABEL_SANDBOX_ID: &str = "io.cynodeai.sandbox.id";
/// Container label for the node (worker state directory) that owns the sandbox.
pub const LABEL_NODE_ID: &str = "io.cynodeai.node.id";
