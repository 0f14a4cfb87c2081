//! The role's API, from its router to real repositories on this machine.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use async_trait::async_trait;
use axum::{
    Router,
    body::{Body, to_bytes},
};
use cynode_api::{
    AllowedAddress, ChangesetFormat, EgressCall, EgressPolicy, EgressPrincipal, GitCommit,
    GitCommitted, GitPush, GitPushed, GitResolve, GitResolved, GitSeed, ProjectId, PromotionId,
    Repository, SEED_NOTES_HEADER,
};
use cynode_service::auth::{Token, Tokens};
use http::{Method, Request};
use parking_lot::Mutex;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tower::ServiceExt as _;
use uuid::Uuid;

use super::*;
use crate::{
    audit::{AuditSink, NotRecorded, RoleOutcome, RoleRecord},
    dial::{Dialer, testing::FixedResolver},
    git::mirror::tests::Origin,
    state::{
        RuleStore, SystemClock,
        testing::{call, state},
    },
    vault::Vault,
};

const TOKEN: &str = "token-of-the-role";

#[derive(Debug, Default)]
struct Records {
    kept: Mutex<Vec<RoleRecord>>,
    is_full: AtomicBool,
}

#[async_trait]
impl AuditSink for Records {
    async fn record(&self, record: RoleRecord) -> Result<(), NotRecorded> {
        if self.is_full.load(Ordering::SeqCst) {
            return Err(NotRecorded);
        }
        self.kept.lock().push(record);
        Ok(())
    }
}

struct World {
    origin: Origin,
    router: Router,
    records: Arc<Records>,
    promotion: PromotionId,
    call: EgressCall,
}

impl World {
    async fn new() -> Self {
        let origin = Origin::new().await;
        origin.write("readme", "one\ntwo\nthree\n");
        origin.write("other", "x\n");
        origin.commit("first");
        origin.git(&["config", "receive.denyCurrentBranch", "ignore"]);
        let role_directory = origin.root.path().join("role");
        let records = Arc::new(Records::default());
        let instance = Uuid::now_v7();
        let trail = RoleTrail::open(role_directory.join("audit"), ROLE, instance).expect("opens");
        let public = vec!["1.1.1.1".parse().expect("an address")];
        let role = GitRole {
            vault: Vault::open(&role_directory.join("key"), ROLE).expect("a key"),
            rules: RuleStore::new(Arc::new(SystemClock), None),
            dialer: Dialer::new(Arc::new(FixedResolver(public))),
            mirrors: Arc::clone(&origin.mirrors),
            audit: Arc::clone(&records) as Arc<dyn AuditSink>,
            instance,
        };
        let tokens = Tokens::new(vec![Token::new(TOKEN)]);
        let router = router(
            Api::new(Arc::new(role), trail, CancellationToken::new()),
            tokens.clone(),
            admin::by_tokens(None, tokens),
        );
        let promotion = PromotionId::generate();
        let call = EgressCall {
            promotion_id: Some(promotion),
            ..call(&origin.access.repository)
        };
        let world = Self {
            origin,
            router,
            records,
            promotion,
            call,
        };
        world
            .put(1, (*world.origin.access.repository).clone())
            .await;
        world
    }

    async fn put(&self, revision: i64, repository: Repository) {
        let (status, problem) = self
            .send(Method::PUT, "state", &state(revision, vec![repository]))
            .await;
        assert_eq!(status, 204, "{problem}");
    }

    async fn raw(&self, request: Request<Body>) -> http::Response<Body> {
        self.router
            .clone()
            .oneshot(request)
            .await
            .expect("an answer")
    }

    async fn send(&self, method: Method, path: &str, body: &impl Serialize) -> (u16, Value) {
        let request = Request::builder()
            .method(method)
            .uri(format!("/v1/egress/{path}"))
            .header("authorization", format!("Bearer {TOKEN}"))
            .header("content-type", "application/json")
            .body(Body::from(serde_json::to_vec(body).expect("serializes")))
            .expect("a request");
        answer(self.raw(request).await).await
    }

    async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, Value> {
        let (status, answer) = self.send(Method::POST, path, body).await;
        if status == 200 {
            Ok(serde_json::from_value(answer).expect("the type"))
        } else {
            Err(answer)
        }
    }

    fn resolve(&self, reference: Option<&str>) -> GitResolve {
        GitResolve {
            version: 1,
            call: self.call.clone(),
            reference: reference.map(str::to_owned),
        }
    }

    fn commit_request(&self, patch: &str, base: &str) -> GitCommit {
        GitCommit {
            version: 1,
            call: self.call.clone(),
            format: ChangesetFormat::Patch,
            sha256: hex::encode(Sha256::digest(patch)),
            base: base.to_owned(),
            target: "main".to_owned(),
            branch: self.branch(),
            message: "Change it".to_owned(),
            author: "Ada".to_owned(),
            at: 1_700_000_000,
        }
    }

    fn branch(&self) -> String {
        format!("cynode/{}/fix", self.call.task_id)
    }

    async fn commit(&self, request: &GitCommit, patch: &str) -> Result<GitCommitted, Value> {
        let boundary = "5f1b0c1e";
        let [head, between, tail] = cynode_api::form_frame(boundary, "changeset");
        let request = serde_json::to_string(request).expect("serializes");
        let body = [
            head.as_slice(),
            request.as_bytes(),
            &between,
            patch.as_bytes(),
            &tail,
        ]
        .concat();
        let request = Request::post("/v1/egress/git/commits")
            .header("authorization", format!("Bearer {TOKEN}"))
            .header(
                "content-type",
                format!("multipart/form-data; boundary={boundary}"),
            )
            .body(Body::from(body))
            .expect("a request");
        match answer(self.raw(request).await).await {
            (200, answer) => Ok(serde_json::from_value(answer).expect("the type")),
            (_, problem) => Err(problem),
        }
    }

    fn push_request(&self, committed: &GitCommitted) -> GitPush {
        GitPush {
            version: 1,
            call: self.call.clone(),
            base: committed.base.clone(),
            target: "main".to_owned(),
            branch: self.branch(),
            commit: committed.commit.clone(),
            revision: committed.revision,
        }
    }

    fn head(&self) -> String {
        self.origin.git(&["rev-parse", "main"])
    }

    fn remote_branch(&self) -> String {
        let name = format!("refs/heads/{}", self.branch());
        self.origin
            .git(&["for-each-ref", "--format=%(objectname)", &name])
    }

    fn outcomes(&self) -> Vec<(String, RoleOutcome)> {
        let kept = self.records.kept.lock();
        kept.iter()
            .map(|record| (record.action.as_str().to_owned(), record.outcome.clone()))
            .collect()
    }
}

async fn answer(response: http::Response<Body>) -> (u16, Value) {
    let status = response.status().as_u16();
    let body = to_bytes(response.into_body(), usize::MAX)
        .await
        .expect("a body");
    (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

fn code(problem: &Value) -> &str {
    problem["code"].as_str().unwrap_or_default()
}

const PATCH: &str = "--- a/readme\n+++ b/readme\n@@ -1,3 +1,3 @@\n one\n-two\n+zwei\n three\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_goes_from_a_reference_to_a_pushed_branch_once() {
    let world = World::new().await;
    let found: GitResolved = world
        .post("git/resolve", &world.resolve(None))
        .await
        .expect("found");
    assert_eq!(found.commit, world.head());
    let committed = world
        .commit(&world.commit_request(PATCH, &found.commit), PATCH)
        .await
        .expect("built");
    assert!(committed.allowed, "{:?}", committed.verdicts);
    assert_eq!(committed.files_total, 1);
    assert_eq!(
        world.remote_branch(),
        "",
        "a commit was pushed before its push"
    );
    let again = world
        .commit(&world.commit_request(PATCH, &found.commit), PATCH)
        .await
        .expect("built");
    assert_eq!(again.commit, committed.commit);
    let push = world.push_request(&committed);
    let pushed: GitPushed = world.post("git/pushes", &push).await.expect("pushed");
    assert!(pushed.pushed);
    assert_eq!(world.remote_branch(), committed.commit);
    let pushed: GitPushed = world.post("git/pushes", &push).await.expect("there");
    assert!(!pushed.pushed);
    let shown = world
        .origin
        .git(&["show", &format!("{}:readme", committed.commit)]);
    assert_eq!(shown, "one\nzwei\nthree");
    // Each operation has its decision and its outcome.
    let outcomes = world.outcomes();
    assert_eq!(outcomes.len(), 10, "{outcomes:?}");
    assert!(
        outcomes
            .chunks(2)
            .all(|pair| pair[0].1 == RoleOutcome::Allowed && pair[0].0 == pair[1].0)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seed_is_streamed_with_its_notes() {
    let world = World::new().await;
    let request = GitSeed {
        version: 1,
        call: world.call.clone(),
        reference: "refs/heads/main".to_owned(),
        commit: world.head(),
        depth: None,
    };
    let request = Request::post("/v1/egress/git/seeds")
        .header("authorization", format!("Bearer {TOKEN}"))
        .body(Body::from(
            serde_json::to_vec(&request).expect("serializes"),
        ))
        .expect("a request");
    let response = world.raw(request).await;
    assert_eq!(response.status(), 200);
    let notes = response.headers()[SEED_NOTES_HEADER]
        .to_str()
        .expect("ascii");
    assert_eq!(
        serde_json::from_str::<cynode_api::SeedNotes>(notes).expect("notes"),
        cynode_api::SeedNotes::default()
    );
    let body = to_bytes(response.into_body(), usize::MAX)
        .await
        .expect("whole");
    assert!(body.len() > 1_024 && body.len() % 512 == 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_token_or_fresh_rules_nothing_is_permitted() {
    let world = World::new().await;
    let request = Request::get("/v1/egress")
        .body(Body::empty())
        .expect("a request");
    assert_eq!(world.raw(request).await.status(), 401);
    let request = Request::get("/v1/egress")
        .header("authorization", format!("Bearer {TOKEN}"))
        .body(Body::empty())
        .expect("a request");
    let (status, info) = answer(world.raw(request).await).await;
    assert_eq!((status, &info["role"]), (200, &json!("git")));
    let (status, problem) = world
        .send(Method::PUT, "state", &state(0, Vec::new()))
        .await;
    assert_eq!((status, code(&problem)), (409, "state_outdated"));
    let foreign = GitResolve {
        call: EgressCall {
            project_id: ProjectId::generate(),
            ..world.call.clone()
        },
        ..world.resolve(None)
    };
    let refused = world.post::<GitResolved>("git/resolve", &foreign).await;
    assert_eq!(code(&refused.expect_err("foreign")), "repository_not_found");
    let nobody = GitResolve {
        call: EgressCall {
            principal: EgressPrincipal::Agent {
                token: Uuid::now_v7(),
                role: "project_analyst".to_owned(),
                user: Uuid::now_v7(),
                project: None,
                tasks: Vec::new(),
            },
            ..world.call.clone()
        },
        ..world.resolve(None)
    };
    let refused = world.post::<GitResolved>("git/resolve", &nobody).await;
    assert_eq!(code(&refused.expect_err("an analyst")), "denied_by_policy");
    assert!(
        !world.origin.mirror_path().exists(),
        "git ran for a refused call"
    );
    let denied = |code: &str| RoleOutcome::Denied {
        code: code.to_owned(),
    };
    let outcomes: Vec<RoleOutcome> = world
        .outcomes()
        .into_iter()
        .map(|(_, outcome)| outcome)
        .collect();
    assert_eq!(
        outcomes,
        [denied("repository_not_found"), denied("denied_by_policy")]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operation_that_can_not_be_recorded_does_not_happen() {
    let world = World::new().await;
    let committed = world
        .commit(&world.commit_request(PATCH, &world.head()), PATCH)
        .await
        .expect("built");
    world.records.is_full.store(true, Ordering::SeqCst);
    let refused = world
        .post::<GitPushed>("git/pushes", &world.push_request(&committed))
        .await;
    assert_eq!(code(&refused.expect_err("unrecorded")), "audit_unavailable");
    assert_eq!(world.remote_branch(), "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_lies_about_branch_paths_or_commit_is_refused() {
    let world = World::new().await;
    let base = world.head();
    let mut request = world.commit_request(PATCH, &base);
    request.branch = "main".to_owned();
    let committed = world.commit(&request, PATCH).await.expect("built");
    assert!(!committed.allowed);
    let committed = world
        .commit(&world.commit_request(PATCH, &base), PATCH)
        .await
        .expect("built");
    for branch in ["main", "release", "cynode/other/fix"] {
        let push = GitPush {
            branch: branch.to_owned(),
            ..world.push_request(&committed)
        };
        let refused = world.post::<GitPushed>("git/pushes", &push).await;
        assert_eq!(
            code(&refused.expect_err("refused")),
            "change_refused",
            "{branch}"
        );
    }
    // A commit of somebody else, and one of another promotion.
    world.origin.git(&["checkout", "--quiet", "-b", "theirs"]);
    world.origin.write("readme", "theirs\n");
    let theirs = world.origin.commit("theirs").to_string();
    world.origin.git(&["checkout", "--quiet", "main"]);
    let push = GitPush {
        commit: theirs,
        ..world.push_request(&committed)
    };
    let refused = world.post::<GitPushed>("git/pushes", &push).await;
    assert_eq!(code(&refused.expect_err("refused")), "change_refused");
    let push = GitPush {
        call: EgressCall {
            promotion_id: Some(PromotionId::generate()),
            ..world.call.clone()
        },
        ..world.push_request(&committed)
    };
    let refused = world.post::<GitPushed>("git/pushes", &push).await;
    assert_eq!(code(&refused.expect_err("refused")), "change_refused");
    // Rules that came after the inspection are applied to the objects.
    let mut repository = (*world.origin.access.repository).clone();
    repository.rules.deny_paths = vec!["readme".to_owned()];
    repository.revision = 2;
    world.put(2, repository).await;
    let refused = world
        .post::<GitPushed>("git/pushes", &world.push_request(&committed))
        .await;
    assert_eq!(code(&refused.expect_err("refused")), "approval_stale");
    let push = GitPush {
        revision: 2,
        ..world.push_request(&committed)
    };
    let refused = world
        .post::<GitPushed>("git/pushes", &push)
        .await
        .expect_err("refused");
    assert_eq!(code(&refused), "change_refused");
    assert_eq!(refused["verdicts"][0]["rule"], "paths");
    assert_eq!(world.remote_branch(), "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn policies_decide_on_each_path_and_on_the_branch() {
    let world = World::new().await;
    let mut rules = state(2, vec![(*world.origin.access.repository).clone()]);
    rules.policies.push(EgressPolicy {
        id: "paths".to_owned(),
        text: "@id(\"docs\") forbid (principal, action == CyNode::Action::\"git.commit\", \
               resource) when { context has path && context.path == \"readme\" };\n\
               @id(\"hands-off\") forbid (principal, action == CyNode::Action::\"git.push\", \
               resource) when { context has branch && context.branch like \"*/fix\" };"
            .to_owned(),
    });
    let (status, problem) = world.send(Method::PUT, "state", &rules).await;
    assert_eq!(status, 204, "{problem}");
    let committed = world
        .commit(&world.commit_request(PATCH, &world.head()), PATCH)
        .await
        .expect("built");
    assert!(!committed.allowed);
    let refusal = committed
        .verdicts
        .iter()
        .find(|verdict| verdict.rule == "policy")
        .expect("a verdict");
    assert!(refusal.reason.contains("paths/docs"), "{refusal:?}");
    let refused = world
        .post::<GitPushed>("git/pushes", &world.push_request(&committed))
        .await
        .expect_err("denied");
    assert_eq!(code(&refused), "denied_by_policy");
    assert_eq!(refused["rules"], json!(["paths/hands-off"]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_changeset_a_conflict_and_a_stale_base_are_told_apart() {
    let world = World::new().await;
    let base = world.head();
    let request = world.commit_request(PATCH, &base);
    let refused = world
        .commit(&request, "another")
        .await
        .expect_err("changed");
    assert!(
        refused["detail"]
            .as_str()
            .is_some_and(|text| text.contains("sha256"))
    );
    let conflict = PATCH.replace("two", "deux");
    let refused = world
        .commit(&world.commit_request(&conflict, &base), &conflict)
        .await
        .expect_err("a conflict");
    assert_eq!(code(&refused), "patch_rejected");
    assert_eq!(refused["rejects"][0]["path"], "readme");
    // The target went on elsewhere: the change still applies.
    world.origin.write("other", "y\n");
    world.origin.commit("other");
    world.commit(&request, PATCH).await.expect("built");
    // And now where the change is.
    world.origin.write("readme", "one\ntwo\nthree\nfour\n");
    let new_base = world.origin.commit("same file").to_string();
    let refused = world.commit(&request, PATCH).await.expect_err("stale");
    assert_eq!(code(&refused), "base_stale");
    assert_eq!(refused["base"], new_base);
    assert_eq!(refused["paths"], json!(["readme"]));
    // A base of another history.
    world
        .origin
        .git(&["checkout", "--quiet", "--orphan", "apart"]);
    let apart = world.origin.commit("apart").to_string();
    world.origin.git(&["checkout", "--quiet", "main"]);
    let refused = world
        .commit(&world.commit_request(PATCH, &apart), PATCH)
        .await
        .expect_err("stale");
    assert_eq!(code(&refused), "base_stale");
    assert_eq!(world.promotion, world.call.promotion_id.expect("one"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_branch_of_somebody_else_is_not_overwritten_and_an_earlier_commit_is_replaced() {
    let world = World::new().await;
    let base = world.head();
    let first = world
        .commit(&world.commit_request(PATCH, &base), PATCH)
        .await
        .expect("built");
    let other = PATCH.replace("zwei", "dos");
    let second = world
        .commit(&world.commit_request(&other, &base), &other)
        .await
        .expect("built");
    for committed in [&first, &second] {
        let pushed: GitPushed = world
            .post("git/pushes", &world.push_request(committed))
            .await
            .expect("pushed");
        assert!(pushed.pushed);
        assert_eq!(world.remote_branch(), committed.commit);
    }
    let name = format!("refs/heads/{}", world.branch());
    world.origin.git(&["update-ref", &name, &base]);
    let refused = world
        .post::<GitPushed>("git/pushes", &world.push_request(&first))
        .await;
    assert_eq!(code(&refused.expect_err("taken")), "branch_exists");
    assert_eq!(world.remote_branch(), base);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn private_addresses_are_dialled_only_where_an_administrator_admitted_them() {
    let world = World::new().await;
    let refused = async |revision, url: &str, addresses: &[(&str, u16)]| {
        let mut repository = (*world.origin.access.repository).clone();
        repository.url = url.to_owned();
        repository.addresses = addresses
            .iter()
            .map(|(cidr, port)| AllowedAddress {
                cidr: (*cidr).to_owned(),
                port: *port,
            })
            .collect();
        world.put(revision, repository).await;
        let refused = world
            .post::<GitResolved>("git/resolve", &world.resolve(None))
            .await
            .expect_err("refused");
        code(&refused).to_owned()
    };
    assert_eq!(
        refused(2, "https://127.0.0.1:1/a", &[]).await,
        "address_refused"
    );
    assert_eq!(
        refused(3, "https://169.254.169.254/a", &[("0.0.0.0/0", 443)]).await,
        "address_refused"
    );
    // A listener of CyNode, whatever is admitted.
    assert_eq!(
        refused(4, "https://127.0.0.1:12080/a", &[("127.0.0.0/8", 12_080)]).await,
        "address_refused"
    );
    // Admitted, and nobody answers.
    assert_eq!(
        refused(5, "https://127.0.0.1:1/a", &[("127.0.0.1", 1)]).await,
        "repository_unreachable"
    );
}
