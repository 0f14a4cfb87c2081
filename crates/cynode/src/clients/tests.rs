//! The clients' table and the edits of their files, against golden texts.

use std::{
    collections::BTreeSet,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
};

use super::{
    edit::{EditError, Spot},
    entry::{ConfigValue, EntrySpec},
    journal::Journal,
    locate::{self, Machine},
    table::{CLIENTS, Client, ConfigFormat, find},
    work::{ClientEntry, ClientReport, State},
};

fn target() -> EntrySpec {
    EntrySpec {
        name: "cynode".to_owned(),
        program: "/opt/cynode".to_owned(),
        arguments: ["mcp", "--workspace", "/w"].map(str::to_owned).to_vec(),
        environment: Vec::new(),
        http: None,
    }
}

/// A home and a project, with files of clients.
struct Files {
    home: tempfile::TempDir,
    project: PathBuf,
    journal: Journal,
}

impl Files {
    fn new() -> Self {
        let home = tempfile::tempdir().expect("a directory");
        let project = home.path().join("project");
        fs_err::create_dir(&project).expect("made");
        Self {
            journal: Journal::new(&home.path().join("state/cynode-client")),
            project,
            home,
        }
    }

    fn machine(&self) -> Machine {
        Machine::new(&[("HOME", self.home.path())], "")
    }

    fn work(&self, id: &str, of_user: bool, target: EntrySpec) -> ClientEntry<'_> {
        let client = find(id).expect(id);
        let (place, in_project) = locate::place(client, of_user).expect("a place");
        ClientEntry {
            client,
            place,
            path: self.machine().path(place, &self.project).expect("a path"),
            directory: PathBuf::from("/w"),
            project: in_project.then(|| self.project.clone()),
            target,
            journal: &self.journal,
            is_detected: true,
        }
    }

    fn path(&self, id: &str) -> PathBuf {
        self.work(id, false, target()).path
    }

    fn put(&self, id: &str, text: &str) -> PathBuf {
        let path = self.path(id);
        fs_err::create_dir_all(path.parent().expect("a parent")).expect("made");
        fs_err::write(&path, text).expect("written");
        path
    }

    fn write(&self, id: &str) -> ClientReport {
        self.work(id, false, target()).write(false)
    }

    fn remove(&self, id: &str) -> ClientReport {
        self.work(id, false, EntrySpec::named("cynode")).remove()
    }
}

fn read(path: &Path) -> String {
    fs_err::read_to_string(path).expect("a file")
}

fn spot(format: ConfigFormat, keys: &'static [&'static str]) -> Spot<'static> {
    Spot {
        format,
        keys,
        name: "cynode",
    }
}

const JSON: Spot<'static> = Spot {
    format: ConfigFormat::Json,
    keys: &["mcpServers"],
    name: "cynode",
};
const TOML: Spot<'static> = Spot {
    format: ConfigFormat::Toml,
    keys: &["mcp_servers"],
    name: "cynode",
};
const YAML: Spot<'static> = Spot {
    format: ConfigFormat::Yaml,
    keys: &["extensions"],
    name: "cynode",
};

fn entry(id: &str) -> ConfigValue {
    target().entry(find(id).expect(id).stdio)
}

#[test]
fn every_client_has_one_id_and_a_file() {
    let ids: BTreeSet<&str> = CLIENTS.iter().map(|client| client.id).collect();
    assert_eq!(ids.len(), CLIENTS.len());
    let sorted: Vec<&str> = CLIENTS.iter().map(|client| client.id).collect();
    assert!(sorted.is_sorted(), "{sorted:?}");
    for client in CLIENTS {
        assert!(
            client.project.is_some() || client.user.is_some(),
            "{}",
            client.id
        );
        assert!(
            !client.programs.is_empty() && !client.markers.is_empty(),
            "{}",
            client.id
        );
    }
}

#[test]
fn a_state_home_is_named_only_if_the_bridge_would_not_find_it() {
    let home = Path::new("/home/me");
    let of = |state: &[(&'static str, &Path)]| {
        let variables = [&[("HOME", home)], state].concat();
        let machine = Machine::new(&variables, "");
        machine.state_home().map(Path::to_owned)
    };
    assert_eq!(of(&[]), None);
    let usual = Path::new("/home/me/.local/state");
    assert_eq!(of(&[("XDG_STATE_HOME", usual)]), None);
    let own = Path::new("/data/state");
    assert_eq!(of(&[("XDG_STATE_HOME", own)]), Some(own.to_owned()));
}

#[test]
fn the_entry_of_every_client_matches_its_golden_text() {
    let files = Files::new();
    let with_token = EntrySpec {
        http: Some(("http://h:1/mcp/coding".to_owned(), "secret".to_owned())),
        environment: vec![("CYNODE_URL".to_owned(), "http://h:1".to_owned())],
        ..target()
    };
    let mut golden: Vec<String> = Vec::new();
    for client in CLIENTS {
        for of_user in [false, true] {
            let work = files.work(client.id, of_user, target());
            let place = work.path.strip_prefix(files.home.path()).expect("below");
            golden.push(format!("{}: {}\n", client.id, place.display()));
        }
        let report = files.work(client.id, false, target()).show(false);
        assert_eq!(report.state, State::Shown, "{report:?}");
        golden.push(report.snippet);
        let report = files.work(client.id, false, with_token.clone()).show(false);
        golden.push(report.snippet);
        let report = files.work(client.id, false, with_token.clone()).show(true);
        golden.push(report.problem.unwrap_or(report.snippet));
        golden.push("\n".to_owned());
    }
    let golden = golden.concat();
    insta::assert_snapshot!(golden);
}

#[test]
fn a_client_is_found_by_its_program_or_its_directory() {
    let home = tempfile::tempdir().expect("a directory");
    let (bin, config) = (home.path().join("bin"), home.path().join("config"));
    fs_err::create_dir_all(&bin).expect("made");
    fs_err::create_dir_all(config.join("goose")).expect("made");
    fs_err::write(bin.join("claude"), "").expect("written");
    fs_err::create_dir_all(home.path().join("elsewhere")).expect("made");
    let machine = Machine::new(
        &[
            ("HOME", home.path()),
            ("XDG_CONFIG_HOME", &config),
            ("CODEX_HOME", &home.path().join("elsewhere")),
        ],
        &format!("relative:{}", bin.display()),
    );
    let found: Vec<&str> = CLIENTS
        .iter()
        .filter(|client| machine.has(client))
        .map(|client| client.id)
        .collect();
    assert_eq!(found, ["claude-code", "codex", "goose"]);
    let client: &'static Client = find("codex").expect("known");
    let (place, _) = locate::place(client, true).expect("a place");
    assert_eq!(
        machine.path(place, Path::new("/p")).expect("a path"),
        home.path().join("elsewhere/config.toml")
    );
    assert!(machine.is_home(&fs_err::canonicalize(home.path()).expect("there")));
}

/// Sets an entry twice and removes it: the second time changes nothing, and what is left says the
/// same as before.
fn round(spot: Spot<'_>, entry: &ConfigValue, text: &str) -> Result<String, EditError> {
    let set = spot.set(text, entry)?;
    assert_eq!(spot.has(&set, entry), Ok(true), "{set}");
    assert_eq!(spot.set(&set, entry)?, set, "not idempotent");
    let removed = spot.remove(&set)?.expect("an entry");
    assert_eq!(spot.entry(&removed), Ok(None), "{removed}");
    assert_eq!(spot.remove(&removed), Ok(None));
    Ok(set)
}

#[test]
fn entries_are_added_to_json_and_the_rest_is_kept() {
    let entry = entry("claude-code");
    let mut golden: Vec<String> = Vec::new();
    for text in [
        "",
        "{}",
        "{}\n",
        "{\"mcpServers\": {}}\n",
        "{\n    \"mcpServers\": {\n        \"other\": {\n            \"command\": \"x\"\n        }\n    },\n    \"theme\": 1.50\n}\n",
        "// Mine.\n{\n\t\"a\": [1, 2,], // one\n\t/* two */\n\t\"mcpServers\": {\n\t\t\"other\": {}, // three\n\t\t// four\n\t},\n}\n",
        "{\r\n  \"a\": null\r\n}\r\n",
        "{\"a\":1}",
        "{\"mcpServers\": null}",
        "{\"mcpServers\": {\"cynode\": {\"command\": \"old\", \"disabled\": true}, \"z\": {}}}",
    ] {
        let set = round(JSON, &entry, text).expect(text);
        golden.push(format!("--- {text:?}\n{set}\n"));
    }
    let golden = golden.concat();
    insta::assert_snapshot!(golden);
}

#[test]
fn entries_are_added_to_toml_and_the_rest_is_kept() {
    let entry = entry("codex");
    let mut golden: Vec<String> = Vec::new();
    for text in [
        "",
        "# Mine.\nmodel = \"o\" # the best\n\n[mcp_servers.other]\ncommand = 'x'\n\n[tui]\na = 1\n",
        "mcp_servers = { other = { command = \"x\" } }\n",
        "[mcp_servers]\n# nothing\n",
        "[mcp_servers.cynode] # mine\ncommand = \"old\" # why\nenabled = false\n\n[z]\n",
        "mcp_servers.cynode.command = \"old\"\n",
        "[[list]]\na = 1979-05-27\n",
    ] {
        let set = round(TOML, &entry, text).expect(text);
        golden.push(format!("--- {text:?}\n{set}\n"));
    }
    let golden = golden.concat();
    insta::assert_snapshot!(golden);
}

#[test]
fn entries_are_added_to_yaml_and_the_rest_is_kept() {
    let entry = entry("goose");
    let mut golden: Vec<String> = Vec::new();
    for text in [
        "",
        "# Nothing yet.\n",
        "GOOSE_MODEL: a # the best\nextensions:\n  # Mine.\n  developer:\n    enabled: true\n    args: [a, 'b']\n\nGOOSE_MODE: auto\n",
        "extensions:\n    developer:\n        type: builtin\n        note: |\n            several\n            lines\n",
        "extensions: {}\nlast: 1\n",
        "extensions: # none\nlast: 1\n",
        "extensions: ~ # none",
        "GOOSE_MODEL: a",
        "extensions:\n  cynode:\n    enabled: false\n    cmd: old\n  # Next.\n  z:\n    a: b\n",
        "---\na: &x {b: c}\nd: *x\n",
    ] {
        let set = round(YAML, &entry, text).expect(text);
        golden.push(format!("--- {text:?}\n{set}\n"));
    }
    let golden = golden.concat();
    insta::assert_snapshot!(golden);
}

#[test]
fn files_that_can_not_be_edited_safely_are_refused() {
    let deep = |open: &str, close: &str| open.repeat(100_000) + &close.repeat(100_000);
    for (spot, entry, texts) in [
        (
            JSON,
            entry("claude-code"),
            vec![
                "[]".to_owned(),
                "nonsense".to_owned(),
                "{\"a\": 1".to_owned(),
                "{a: 1}".to_owned(),
                "{'a': 1}".to_owned(),
                "{\"mcpServers\": []}".to_owned(),
                "{\"mcpServers\": \"x\"}".to_owned(),
                "{\"mcpServers\": {}, \"mcpServers\": {}}".to_owned(),
                "{\"mcpServers\": {\"cynode\": 1, \"cynode\": 2}}".to_owned(),
                "\0".to_owned(),
                deep("[", "]"),
                deep("{\"a\":", "}"),
            ],
        ),
        (
            TOML,
            entry("codex"),
            vec![
                "a = ".to_owned(),
                "mcp_servers = 1".to_owned(),
                "mcp_servers = []".to_owned(),
                "[[mcp_servers]]".to_owned(),
                "[mcp_servers.cynode]\n[mcp_servers.cynode]".to_owned(),
                format!("a = {}", deep("[", "]")),
            ],
        ),
        (
            YAML,
            entry("goose"),
            vec![
                "- a".to_owned(),
                "a: b: c".to_owned(),
                "text".to_owned(),
                "extensions: [a]".to_owned(),
                "extensions: text".to_owned(),
                "extensions: {a: {b: c}}".to_owned(),
                "extensions:\n  a: {}\nextensions:\n  b: {}\n".to_owned(),
                "extensions:\n  cynode: {}\n  cynode: {}\n".to_owned(),
                "a: 1\n---\nb: 2\n".to_owned(),
                "a: 1\n...\n".to_owned(),
                "a: \"b\nc\"\nextensions: &x\n  a: {}\nd: |\n extensions:\n".to_owned(),
                "? [a]\n: b\n".to_owned(),
                format!("a: {}", deep("[", "]")),
                (0..200)
                    .map(|at| {
                        " ".repeat(at)
                            + "a:
"
                    })
                    .collect(),
            ],
        ),
    ] {
        for text in texts {
            let shown: String = text.chars().take(60).collect();
            let set = spot.set(&text, &entry);
            // What is accepted is right; it is verified again here.
            if let Ok(set) = set {
                assert_eq!(spot.has(&set, &entry), Ok(true), "{shown}");
                assert!(shown.starts_with("a: "), "accepted: {shown}");
            }
        }
    }
    let other = spot(ConfigFormat::Json, &["mcp"]);
    assert_eq!(
        other.set("{\"mcp\": 7}", &entry("opencode")),
        Err(EditError::NotAMap("'mcp'".to_owned()))
    );
}

#[test]
fn newer_forms_of_a_file_are_kept() {
    let files = Files::new();
    files.put("opencode", "{\"mcp\": {\"servers\": {\"a\": {}}}}");
    assert_eq!(files.write("opencode").state, State::Written);
    let value: serde_json::Value =
        serde_json::from_str(&read(&files.path("opencode"))).expect("JSON");
    assert_eq!(value["mcp"]["servers"]["cynode"]["type"], "local");
    // A server of that name is none of it.
    let files = Files::new();
    files.put(
        "opencode",
        "{\"mcp\": {\"servers\": {\"type\": \"local\", \"command\": []}}}",
    );
    files.write("opencode");
    let value: serde_json::Value =
        serde_json::from_str(&read(&files.path("opencode"))).expect("JSON");
    assert_eq!(value["mcp"]["cynode"]["type"], "local");
}

#[test]
fn a_file_is_written_once_and_removal_restores_every_byte() {
    for (id, text) in [
        ("claude-code", "{ \"mcpServers\": { } ,\"x\":1 }"),
        ("claude-code", "// c\n{\"a\": [ 1 ],}\n\n"),
        ("codex", "a=1\n#b"),
        ("goose", "extensions: {} # c\na: b"),
        ("vscode", ""),
    ] {
        let files = Files::new();
        let path = files.put(id, text);
        fs_err::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).expect("set");
        let written = files.write(id);
        assert_eq!(written.state, State::Written, "{written:?}");
        assert!(written.diff.contains("/opt/cynode"), "{}", written.diff);
        let after = read(&path);
        let again = files.write(id);
        assert_eq!((again.state, read(&path)), (State::Unchanged, after));
        assert_eq!(
            files.work(id, false, target()).show(false).state,
            State::Present
        );
        // Other arguments for the same directory replace the entry.
        let mut other = target();
        other.arguments.push("--gitignore".to_owned());
        let changed = files.work(id, false, other).write(false);
        assert_eq!(changed.state, State::Written);
        let mode = fs_err::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        let removed = files.remove(id);
        assert_eq!(
            (removed.state, read(&path).as_str()),
            (State::Removed, text)
        );
        assert_eq!(files.remove(id).state, State::Absent);
    }
}

#[test]
fn a_file_that_was_made_goes_with_its_entry() {
    for id in ["cursor", "codex", "goose", "claude-code"] {
        let files = Files::new();
        assert_eq!(files.remove(id).state, State::Absent);
        assert_eq!(files.write(id).state, State::Written);
        let path = files.path(id);
        assert!(path.is_file());
        assert_eq!(files.remove(id).state, State::Removed, "{id}");
        assert!(!path.exists());
        let left: Vec<_> = fs_err::read_dir(&files.project)
            .expect("a directory")
            .map(|entry| entry.expect("an entry").file_name())
            .collect();
        assert_eq!(left, Vec::<std::ffi::OsString>::new(), "{id}");
    }
}

#[test]
fn what_others_changed_since_stays() {
    let files = Files::new();
    let path = files.put("cursor", "{}");
    files.write("cursor");
    let other = read(&path).replacen('{', "{\n  \"theirs\": \"kept\",", 1);
    fs_err::write(&path, &other).expect("written");
    assert_eq!(files.remove("cursor").state, State::Removed);
    let value: serde_json::Value = serde_json::from_str(&read(&path)).expect("JSON");
    assert_eq!(value["theirs"], "kept");
    assert!(value["mcpServers"].get("cynode").is_none());
    // An entry that somebody else made is not taken away.
    fs_err::write(
        &path,
        "{\"mcpServers\": {\"cynode\": {\"command\": \"x\"}}}",
    )
    .expect("written");
    let refused = files.remove("cursor");
    assert_eq!(refused.state, State::Refused);
    assert!(
        refused
            .problem
            .is_some_and(|it| it.contains("not written by")),
        "no reason"
    );
    // Without the journal, an entry is known by what it starts.
    fs_err::write(
        &path,
        "{\"mcpServers\": {\"cynode\": {\"command\": \"/bin/cynode\", \"args\": [\"mcp\"]}}}",
    )
    .expect("written");
    assert_eq!(files.remove("cursor").state, State::Removed);
}

#[test]
fn links_and_other_things_in_the_place_of_a_file_are_left_alone() {
    let refused = |files: &Files, words: &str| {
        for report in [files.write("cursor"), files.remove("cursor")] {
            assert_eq!(report.state, State::Refused, "{words}");
            let problem = report.problem.unwrap_or_default();
            assert!(problem.contains(words), "{problem}");
        }
    };
    let files = Files::new();
    let victim = files.home.path().join("victim.json");
    fs_err::write(&victim, "{}").expect("written");
    let path = files.path("cursor");
    fs_err::create_dir(path.parent().expect("a parent")).expect("made");
    symlink(&victim, &path).expect("linked");
    refused(&files, "is a symbolic link to");
    assert_eq!(read(&victim), "{}");

    // A project can't lead out of itself by a directory, either.
    let files = Files::new();
    let elsewhere = files.home.path().join("elsewhere");
    fs_err::create_dir(&elsewhere).expect("made");
    fs_err::write(elsewhere.join("mcp.json"), "{}").expect("written");
    symlink(&elsewhere, files.project.join(".cursor")).expect("linked");
    refused(&files, "is a symbolic link to");
    assert_eq!(read(&elsewhere.join("mcp.json")), "{}");

    let files = Files::new();
    fs_err::write(files.project.join(".cursor"), "").expect("written");
    refused(&files, "is not a directory");

    let files = Files::new();
    fs_err::create_dir_all(files.path("cursor")).expect("made");
    refused(&files, "is not a file");

    let files = Files::new();
    let path = files.put("cursor", "");
    fs_err::remove_file(&path).expect("removed");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &path,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .expect("made");
    refused(&files, "is not a file");

    let files = Files::new();
    fs_err::write(files.put("cursor", ""), b"\xff\xfe").expect("written");
    refused(&files, "is not UTF-8");
}

#[test]
// invariant: bounded
fn a_file_beyond_the_limit_is_left_alone() {
    let files = Files::new();
    let long = format!("{{\"a\": \"{}\"}}", "x".repeat(16 << 20));
    let path = files.put("cursor", &long);
    let report = files.write("cursor");
    assert!(
        report
            .problem
            .is_some_and(|problem| problem.contains("is longer than")),
        "not refused"
    );
    let longest = format!("{{\"a\": \"{}\"}}", "x".repeat((16 << 20) - 9));
    assert_eq!(longest.len(), 16 << 20);
    fs_err::write(&path, longest).expect("written");
    assert_eq!(files.write("cursor").state, State::Written);
}

#[test]
fn a_byte_order_mark_stays() {
    let files = Files::new();
    let path = files.put("cursor", "\u{feff}{}");
    assert_eq!(files.write("cursor").state, State::Written);
    assert!(read(&path).starts_with("\u{feff}{"));
    files.remove("cursor");
    assert_eq!(read(&path), "\u{feff}{}");
}

#[test]
fn a_token_is_in_the_file_only_and_the_file_is_private() {
    let files = Files::new();
    let with_token = EntrySpec {
        http: Some((
            "http://h:1/mcp/coding".to_owned(),
            "cyn_verysecrettoken".to_owned(),
        )),
        ..target()
    };
    let report = files.work("cursor", false, with_token).write(true);
    assert_eq!(report.state, State::Written);
    let path = files.path("cursor");
    assert!(read(&path).contains("Bearer cyn_verysecrettoken"));
    let mode = fs_err::metadata(&path).expect("there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let told = serde_json::to_string(&report).expect("JSON");
    assert!(
        !told.contains("verysecret") && told.contains("cyn_…"),
        "{told}"
    );
}

#[test]
// invariant: no-secrets-inside
fn no_diff_shows_a_token() {
    let files = Files::new();
    let with_token = EntrySpec {
        http: Some((
            "http://h:1/mcp/coding".to_owned(),
            "cyn_verysecrettoken".to_owned(),
        )),
        ..target()
    };
    files.work("cursor", false, with_token).write(true);
    // One line has the entry and another server's.
    let path = files.path("cursor");
    let other = read(&path).replace(['\n', ' '], "").replacen(
        "\"cynode\":",
        "\"other\":{\"env\":{\"T\":\"cyn_anothersecret\"}},\"cynode\":",
        1,
    );
    fs_err::write(&path, other).expect("written");
    let report = files.remove("cursor");
    assert_eq!(report.state, State::Removed);
    assert!(
        report.diff.contains("cyn_…") && !report.diff.contains("secret"),
        "{}",
        report.diff
    );
    assert_eq!(report.removed_tokens, ["cyn_verysecrettoken"]);
    assert!(
        !serde_json::to_string(&report)
            .expect("JSON")
            .contains("secret")
    );
}

#[test]
fn an_entry_of_another_directory_or_of_somebody_else_is_not_replaced() {
    let files = Files::new();
    let elsewhere = |directory: &str| {
        let arguments = ["mcp", "--workspace", directory].map(str::to_owned);
        let spec = EntrySpec {
            arguments: arguments.to_vec(),
            ..target()
        };
        let mut work = files.work("goose", true, spec);
        work.directory = PathBuf::from(directory);
        work
    };
    assert_eq!(elsewhere("/a").write(false).state, State::Written);
    let path = elsewhere("/a").path;
    let first = read(&path);
    let refused = elsewhere("/b").write(false);
    assert_eq!(refused.state, State::Refused);
    assert!(
        refused.problem.is_some_and(|it| it.ends_with("is for /a"))
            && refused.remedy.is_some_and(|it| it.contains("--name")),
        "no reason"
    );
    let mut removal = files.work("goose", true, EntrySpec::named("cynode"));
    removal.directory = PathBuf::from("/b");
    assert_eq!(removal.remove().state, State::Refused);
    assert_eq!(read(&path), first);
    // The same directory may change its entry, and another name is free.
    let mut changed = elsewhere("/a");
    changed.target.arguments.push("--gitignore".to_owned());
    assert_eq!(changed.write(false).state, State::Written);
    let mut named = elsewhere("/b");
    named.target.name = "cynode-b".to_owned();
    assert_eq!(named.write(false).state, State::Written);

    // The user's own.
    let files = Files::new();
    let path = files.put(
        "cursor",
        "{\"mcpServers\": {\"cynode\": {\"command\": \"x\"}}}",
    );
    let before = read(&path);
    let refused = files.write("cursor");
    assert_eq!(refused.state, State::Refused);
    assert!(refused.remedy.is_some_and(|it| it.contains("--name")));
    assert_eq!(read(&path), before);
}

#[test]
fn files_keep_their_line_ends() {
    for (spot, text) in [
        (YAML, "a: 1\r\nextensions:\r\n  x:\r\n    y: 1\r\n"),
        (JSON, "{\r\n  \"a\": 1\r\n}\r\n"),
        (TOML, "a = 1\r\n"),
    ] {
        let id = if spot.format == ConfigFormat::Toml {
            "codex"
        } else {
            "cursor"
        };
        let written = spot.set(text, &entry(id)).expect("edited");
        assert_eq!(
            written.matches('\n').count(),
            written.matches("\r\n").count(),
            "{written:?}"
        );
        let removed = spot.remove(&written).expect("edited").expect("removed");
        assert_eq!(
            removed.matches('\n').count(),
            removed.matches("\r\n").count(),
            "{removed:?}"
        );
    }
}
