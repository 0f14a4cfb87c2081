//! Git egress: a repository comes in, a commit and a pull request go out, and the credential stays
//! with the role.

mod approval;
mod inside;
mod kills;
mod promotion;
mod refusals;
mod role;
mod scan;

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use cynode_tests::{BASE, GitServer, ServedRepository};
use serde_json::{Value, json};

use super::stack::Stack;
use crate::cli::{CommandResult, run};

const TIMEOUT: Duration = Duration::from_secs(60);
const USERNAME: &str = "robot";
/// Where the repository is, on the server and for the forges.
const PATH: &str = "team/shop";

/// The files of the repository: a program with a mistake, and its test.
const FILES: [(&str, &str); 4] = [
    ("README.md", "# Shop\n"),
    ("sum.sh", "#!/bin/sh\necho $(($1 - $2))\n"),
    ("test.sh", "#!/bin/sh\n[ \"$(sh ./sum.sh 2 3)\" = 5 ]\n"),
    (".github/workflows/ci.yml", "on: push\n"),
];
/// Corrects the mistake.
const FIX: &str = "sed -i 's/ - / + /' sum.sh";

/// Every role on one machine, a git server, and its repository, registered as `shop`.
struct GitFixture {
    stack: Stack,
    server: GitServer,
    served: ServedRepository,
    provider: &'static str,
    secret: String,
    task: String,
}

impl GitFixture {
    async fn start(provider: &'static str) -> Result<Self> {
        let stack = Stack::new()?;
        let server = GitServer::start(&stack.world.directory().join("git-server")).await?;
        let served = server.create(&format!("{PATH}.git"), &FILES)?;
        // Assembled here, without the shape of any service's tokens.
        let secret = ["planted", &uuid::Uuid::new_v4().simple().to_string()].concat();
        server.require(USERNAME, &secret);
        let images = format!("orchestrator.seed_images=[{BASE:?}]");
        let image = format!("orchestrator.default_image={BASE}");
        stack.up_with(&["--set", &images, "--set", &image])?;
        let mut fixture = Self {
            stack,
            server,
            served,
            provider,
            secret,
            task: String::new(),
        };
        fixture.cli(&["project", "create", "own"])?.success()?;
        fixture.task = fixture.task_of("own", "repair")?;
        let url = fixture.server.url("");
        fixture.add_credential("robot", "own", url.trim_end_matches('/'))?;
        fixture
            .register("shop", "own", &json!({}), &[])?
            .success()?;
        Ok(fixture)
    }

    fn cli(&self, arguments: &[&str]) -> Result<CommandResult> {
        self.stack.run(arguments)
    }

    fn cli_with_input(&self, arguments: &[&str], input: &[u8]) -> Result<CommandResult> {
        run(self.stack.command()?.args(arguments), input)
    }

    fn json(&self, arguments: &[&str]) -> Result<Value> {
        self.cli(&[&["--output", "json"], arguments].concat())?
            .json()
    }

    fn task_of(&self, project: &str, name: &str) -> Result<String> {
        let created = self.cli(&["task", "create", name, "--project", project])?;
        Ok(created.success()?.trim_end().to_owned())
    }

    fn add_credential(&self, name: &str, project: &str, url: &str) -> Result<()> {
        let arguments = [
            "credential",
            "add",
            name,
            "--project",
            project,
            "--url",
            url,
            "--username",
            USERNAME,
        ];
        let added = self.cli_with_input(&arguments, format!("{}\n", self.secret).as_bytes())?;
        added.success().map(drop)
    }

    /// Registers the repository under a name, with these rules.
    fn register(
        &self,
        name: &str,
        project: &str,
        rules: &Value,
        more: &[&str],
    ) -> Result<CommandResult> {
        let url = self.server.url(&format!("{PATH}.git"));
        self.register_at(name, project, &url, rules, more)
    }

    fn register_at(
        &self,
        name: &str,
        project: &str,
        url: &str,
        rules: &Value,
        more: &[&str],
    ) -> Result<CommandResult> {
        let file = self.stack.world.directory().join(format!("{name}.json"));
        fs_err::write(&file, rules.to_string())?;
        let rules = file.to_str().context("a path")?;
        let authority = self.server.authority().to_str().context("a path")?;
        let port = url
            .rsplit_once(':')
            .and_then(|(_, rest)| rest.split('/').next())
            .context("a port")?;
        let addresses = ["127.0.0.1/32", "::1/128"].map(|cidr| format!("{cidr}:{port}"));
        let arguments = [
            "repository",
            "add",
            name,
            "--project",
            project,
            "--provider",
            self.provider,
            "--url",
            url,
            "--credential",
            "robot",
            "--host-ca",
            authority,
            "--address",
            &addresses[0],
            "--address",
            &addresses[1],
            "--rules",
            rules,
        ];
        self.cli(&[&arguments, more].concat())
    }

    /// Creates a session with the repository, and returns its id.
    fn session(&self, repository: &str) -> Result<String> {
        self.session_of(&self.task, repository)
    }

    fn session_of(&self, task: &str, repository: &str) -> Result<String> {
        let created = self.cli(&["session", "create", "--repo", repository, "--task", task])?;
        Ok(created.success()?.trim_end().to_owned())
    }

    /// Runs a script in a session.
    fn sh(&self, session: &str, script: &str) -> Result<CommandResult> {
        self.cli(&["session", "exec", session, "--", "sh", "-ec", script])
    }

    /// Promotes the changes of a session.
    fn promote(&self, session: &str, repository: &str, more: &[&str]) -> Result<CommandResult> {
        let arguments = [
            "--output",
            "json",
            "promote",
            session,
            "--repo",
            repository,
            "--title",
            "Add the sum",
        ];
        self.cli(&[&arguments, more].concat())
    }

    /// Stores a patch as an artifact of the task, and returns its id.
    fn patch(&self, name: &str, patch: &str) -> Result<String> {
        let arguments = ["artifact", "put", "--task", &self.task, "-", name];
        let stored = self.cli_with_input(&arguments, patch.as_bytes())?;
        Ok(stored.success()?.trim_end().to_owned())
    }

    /// Promotes an artifact that was made against a commit.
    fn promote_artifact(
        &self,
        artifact: &str,
        repository: &str,
        base: &str,
        branch: &str,
    ) -> Result<CommandResult> {
        self.cli(&[
            "--output",
            "json",
            "promote",
            "--changeset",
            artifact,
            "--repo",
            repository,
            "--base",
            base,
            "--branch",
            branch,
            "--title",
            "Change",
        ])
    }

    fn promotion(&self, id: &str) -> Result<Value> {
        self.json(&["promotion", "show", id])
    }

    /// The pid of a role of `up`.
    fn role(&self, role: &str) -> Result<u32> {
        let text = match role {
            "git" => "egress --role git",
            "postgres" => "bin/postgres -D",
            other => return self.stack.child(&format!("{other} --parent")),
        };
        self.stack.child(text)
    }

    /// The secret in every form in which it may appear somewhere.
    fn forms(&self) -> Vec<String> {
        let pair = format!("{USERNAME}:{}", self.secret);
        vec![
            self.secret.clone(),
            STANDARD.encode(&self.secret),
            STANDARD.encode(pair),
            hex::encode(&self.secret),
        ]
    }

    /// What the server saw was this credential, and nothing else.
    fn assert_presented(&self) -> Result<()> {
        let pair = format!("{USERNAME}:{}", self.secret);
        let allowed = [
            format!("Basic {}", STANDARD.encode(pair)),
            format!("Bearer {}", self.secret),
            format!("token {}", self.secret),
            self.secret.clone(),
        ];
        let presented = self.server.presented();
        ensure!(!presented.is_empty(), "the credential was never used");
        for value in presented {
            ensure!(allowed.contains(&value), "another credential: {value}");
        }
        Ok(())
    }

    /// Nothing has reached the repository or its forge.
    fn assert_untouched(&self) -> Result<()> {
        let branches = self.served.branches()?;
        ensure!(
            branches.iter().all(|branch| !branch.starts_with("cynode/")),
            "pushed: {branches:?}"
        );
        let pulls = self.server.pulls();
        ensure!(pulls.is_empty(), "opened: {pulls:?}");
        Ok(())
    }

    fn down(&self) -> Result<()> {
        self.stack.down()
    }
}

/// The exit code and the code of a failed command that was to print JSON.
fn refused(result: &CommandResult) -> Result<(i32, String, Value)> {
    let line = result
        .stderr
        .lines()
        .rev()
        .find(|line| line.starts_with('{'))
        .with_context(|| format!("no problem document: {result:?}"))?;
    let problem: Value = serde_json::from_str(line)?;
    let code = problem["code"].as_str().context("a code")?.to_owned();
    Ok((result.code.unwrap_or(-1), code, problem))
}

/// A patch that creates a file.
fn creates(path: &str, mode: &str, content: &str) -> String {
    let lines: Vec<String> = content.lines().map(|line| format!("+{line}\n")).collect();
    let newline = if content.ends_with('\n') {
        ""
    } else {
        "\\ No newline at end of file\n"
    };
    format!(
        "diff --git a/{path} b/{path}\nnew file mode {mode}\n--- /dev/null\n+++ b/{path}\n\
         @@ -0,0 +1,{} @@\n{}{newline}",
        lines.len(),
        lines.concat()
    )
}

/// A patch that replaces the only line of a file.
fn replaces(path: &str, old: &str, new: &str) -> String {
    format!(
        "diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-{old}\n+{new}\n"
    )
}

/// A patch that corrects the mistake of `sum.sh`.
fn fixes() -> String {
    "diff --git a/sum.sh b/sum.sh\n--- a/sum.sh\n+++ b/sum.sh\n@@ -1,2 +1,2 @@\n #!/bin/sh\n\
     -echo $(($1 - $2))\n+echo $(($1 + $2))\n"
        .to_owned()
}
