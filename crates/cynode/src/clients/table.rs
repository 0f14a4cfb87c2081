//! The MCP clients that are known, as data: where each keeps its configuration, and what an entry
//! looks like there.

use super::entry::Field;

/// A program that speaks the protocol.
#[derive(Debug)]
pub struct Client {
    /// As on the command line.
    pub id: &'static str,
    pub name: &'static str,
    /// Programs on the PATH by which it is found.
    pub programs: &'static [&'static str],
    /// Directories by which it is found.
    pub markers: &'static [Location],
    /// The file of a project; preferred, because an entry is for one directory.
    pub project: Option<Place>,
    pub user: Option<Place>,
    pub stdio: Shape,
    /// How it calls a server itself. `None` if a file can't tell it to.
    pub http: Option<Shape>,
    /// What its users should know.
    pub note: Option<&'static str>,
}

pub type Shape = &'static [(&'static str, Field)];

/// A configuration file.
#[derive(Debug)]
pub struct Place {
    /// The one that exists is used, or else the first.
    pub files: &'static [Location],
    pub format: ConfigFormat,
    /// The keys of the map that holds the entries, outermost first.
    pub keys: &'static [&'static str],
    /// Keys that are used instead if a file has them already.
    pub other_keys: Option<&'static [&'static str]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigFormat {
    /// JSON, with comments and trailing commas where the file has them.
    Json,
    Toml,
    Yaml,
}

/// A path, and what it is relative to.
#[derive(Clone, Copy, Debug)]
pub enum Location {
    Project(&'static str),
    Home(&'static str),
    /// `$XDG_CONFIG_HOME`
    Config(&'static str),
    /// A directory that a variable names, or else one in the home directory.
    Variable(&'static str, &'static str, &'static str),
}

impl Client {
    /// The files that it reads, relative to a project or to the home directory.
    pub fn configuration_files(&self) -> impl Iterator<Item = String> {
        let places = self.project.iter().chain(&self.user);
        places.flat_map(|place| place.files).map(|file| match file {
            Location::Project(path) | Location::Home(path) => (*path).to_owned(),
            Location::Config(path) => format!(".config/{path}"),
            Location::Variable(_, directory, name) => format!("{directory}/{name}"),
        })
    }
}

const fn json(files: &'static [Location], keys: &'static [&'static str]) -> Place {
    Place {
        files,
        format: ConfigFormat::Json,
        keys,
        other_keys: None,
    }
}

const MCP_SERVERS: &[&str] = &["mcpServers"];
/// The first call brings a directory in, and commands take their time.
const PATIENCE_SECONDS: i64 = 600;
const DESCRIPTION: &str = "A Linux sandbox with a workspace";

const PLAIN: Shape = &[
    ("command", Field::Program),
    ("args", Field::Arguments),
    ("env", Field::Environment),
];
const WITH_TYPE: Shape = &[
    ("type", Field::Text("stdio")),
    ("command", Field::Program),
    ("args", Field::Arguments),
    ("env", Field::Environment),
];
const HTTP: Shape = &[
    ("type", Field::Text("http")),
    ("url", Field::Url),
    ("headers", Field::Headers),
];
const PLAIN_HTTP: Shape = &[("url", Field::Url), ("headers", Field::Headers)];

pub const CLIENTS: &[Client] = &[
    Client {
        id: "claude-code",
        name: "Claude Code",
        programs: &["claude"],
        markers: &[Location::Home(".claude")],
        project: Some(json(&[Location::Project(".mcp.json")], MCP_SERVERS)),
        user: Some(json(&[Location::Home(".claude.json")], MCP_SERVERS)),
        stdio: WITH_TYPE,
        http: Some(HTTP),
        note: Some("It asks once whether the servers of this project may start."),
    },
    Client {
        id: "claude-desktop",
        name: "Claude Desktop",
        programs: &["claude-desktop"],
        markers: &[Location::Config("Claude")],
        project: None,
        user: Some(json(
            &[Location::Config("Claude/claude_desktop_config.json")],
            MCP_SERVERS,
        )),
        stdio: PLAIN,
        http: None,
        note: Some("Restart it."),
    },
    Client {
        id: "codex",
        name: "Codex",
        programs: &["codex"],
        markers: &[Location::Variable("CODEX_HOME", ".codex", "")],
        project: Some(Place {
            files: &[Location::Project(".codex/config.toml")],
            format: ConfigFormat::Toml,
            keys: &["mcp_servers"],
            other_keys: None,
        }),
        user: Some(Place {
            files: &[Location::Variable("CODEX_HOME", ".codex", "config.toml")],
            format: ConfigFormat::Toml,
            keys: &["mcp_servers"],
            other_keys: None,
        }),
        stdio: &[
            ("command", Field::Program),
            ("args", Field::Arguments),
            ("env", Field::Environment),
            ("tool_timeout_sec", Field::Number(PATIENCE_SECONDS)),
        ],
        http: Some(&[
            ("url", Field::Url),
            ("http_headers", Field::Headers),
            ("tool_timeout_sec", Field::Number(PATIENCE_SECONDS)),
        ]),
        note: Some("It reads the file of a project only if the project is trusted."),
    },
    Client {
        id: "copilot",
        name: "GitHub Copilot CLI",
        programs: &["copilot"],
        markers: &[Location::Variable("COPILOT_HOME", ".copilot", "")],
        project: None,
        user: Some(json(
            &[Location::Variable(
                "COPILOT_HOME",
                ".copilot",
                "mcp-config.json",
            )],
            MCP_SERVERS,
        )),
        stdio: &[
            ("type", Field::Text("local")),
            ("command", Field::Program),
            ("args", Field::Arguments),
            ("env", Field::Environment),
            ("tools", Field::Texts(&["*"])),
        ],
        http: Some(&[
            ("type", Field::Text("http")),
            ("url", Field::Url),
            ("headers", Field::Headers),
            ("tools", Field::Texts(&["*"])),
        ]),
        note: None,
    },
    Client {
        id: "cursor",
        name: "Cursor",
        programs: &["cursor", "cursor-agent"],
        markers: &[Location::Home(".cursor")],
        project: Some(json(&[Location::Project(".cursor/mcp.json")], MCP_SERVERS)),
        user: Some(json(&[Location::Home(".cursor/mcp.json")], MCP_SERVERS)),
        stdio: WITH_TYPE,
        http: Some(PLAIN_HTTP),
        note: None,
    },
    Client {
        id: "gemini",
        name: "Gemini CLI",
        programs: &["gemini"],
        markers: &[Location::Home(".gemini")],
        project: Some(json(
            &[Location::Project(".gemini/settings.json")],
            MCP_SERVERS,
        )),
        user: Some(json(
            &[Location::Home(".gemini/settings.json")],
            MCP_SERVERS,
        )),
        stdio: PLAIN,
        http: Some(&[("httpUrl", Field::Url), ("headers", Field::Headers)]),
        note: None,
    },
    Client {
        id: "goose",
        name: "Goose",
        programs: &["goose"],
        markers: &[Location::Config("goose")],
        project: None,
        user: Some(Place {
            files: &[Location::Config("goose/config.yaml")],
            format: ConfigFormat::Yaml,
            keys: &["extensions"],
            other_keys: None,
        }),
        stdio: &[
            ("enabled", Field::Yes),
            ("type", Field::Text("stdio")),
            ("name", Field::Name),
            ("description", Field::Text(DESCRIPTION)),
            ("cmd", Field::Program),
            ("args", Field::Arguments),
            ("envs", Field::Environment),
            ("timeout", Field::Number(PATIENCE_SECONDS)),
        ],
        http: Some(&[
            ("enabled", Field::Yes),
            ("type", Field::Text("streamable_http")),
            ("name", Field::Name),
            ("description", Field::Text(DESCRIPTION)),
            ("uri", Field::Url),
            ("headers", Field::Headers),
            ("timeout", Field::Number(PATIENCE_SECONDS)),
        ]),
        note: None,
    },
    Client {
        id: "kiro",
        name: "Kiro",
        programs: &["kiro", "kiro-cli"],
        markers: &[Location::Home(".kiro")],
        project: Some(json(
            &[Location::Project(".kiro/settings/mcp.json")],
            MCP_SERVERS,
        )),
        user: Some(json(
            &[Location::Home(".kiro/settings/mcp.json")],
            MCP_SERVERS,
        )),
        stdio: PLAIN,
        http: Some(PLAIN_HTTP),
        note: None,
    },
    Client {
        id: "opencode",
        name: "opencode",
        programs: &["opencode"],
        markers: &[Location::Config("opencode")],
        project: Some(Place {
            files: &[
                Location::Project("opencode.json"),
                Location::Project("opencode.jsonc"),
            ],
            format: ConfigFormat::Json,
            keys: &["mcp"],
            other_keys: Some(&["mcp", "servers"]),
        }),
        user: Some(Place {
            files: &[
                Location::Config("opencode/opencode.json"),
                Location::Config("opencode/opencode.jsonc"),
            ],
            format: ConfigFormat::Json,
            keys: &["mcp"],
            other_keys: Some(&["mcp", "servers"]),
        }),
        stdio: &[
            ("type", Field::Text("local")),
            ("command", Field::CommandLine),
            ("environment", Field::Environment),
        ],
        http: Some(&[
            ("type", Field::Text("remote")),
            ("url", Field::Url),
            ("headers", Field::Headers),
        ]),
        note: None,
    },
    Client {
        id: "openhands",
        name: "OpenHands",
        programs: &["openhands"],
        markers: &[Location::Home(".openhands")],
        project: None,
        user: Some(json(&[Location::Home(".openhands/mcp.json")], MCP_SERVERS)),
        stdio: PLAIN,
        http: Some(&[
            ("url", Field::Url),
            ("transport", Field::Text("http")),
            ("headers", Field::Headers),
        ]),
        note: None,
    },
    Client {
        id: "qwen",
        name: "Qwen Code",
        programs: &["qwen"],
        markers: &[Location::Home(".qwen")],
        project: Some(json(
            &[Location::Project(".qwen/settings.json")],
            MCP_SERVERS,
        )),
        user: Some(json(&[Location::Home(".qwen/settings.json")], MCP_SERVERS)),
        stdio: PLAIN,
        http: Some(&[("httpUrl", Field::Url), ("headers", Field::Headers)]),
        note: None,
    },
    Client {
        id: "vscode",
        name: "VS Code",
        programs: &["code", "code-insiders"],
        markers: &[Location::Config("Code")],
        project: Some(json(&[Location::Project(".vscode/mcp.json")], &["servers"])),
        user: Some(json(
            &[Location::Config("Code/User/mcp.json")],
            &["servers"],
        )),
        stdio: WITH_TYPE,
        http: Some(HTTP),
        note: None,
    },
    Client {
        id: "windsurf",
        name: "Windsurf",
        programs: &["windsurf"],
        markers: &[Location::Home(".codeium/windsurf")],
        project: None,
        user: Some(json(
            &[Location::Home(".codeium/windsurf/mcp_config.json")],
            MCP_SERVERS,
        )),
        stdio: PLAIN,
        http: Some(&[("serverUrl", Field::Url), ("headers", Field::Headers)]),
        note: None,
    },
    Client {
        id: "zed",
        name: "Zed",
        programs: &["zed", "zeditor"],
        markers: &[Location::Config("zed")],
        project: None,
        user: Some(json(
            &[Location::Config("zed/settings.json")],
            &["context_servers"],
        )),
        stdio: PLAIN,
        http: Some(PLAIN_HTTP),
        note: None,
    },
];

pub fn find(id: &str) -> Option<&'static Client> {
    CLIENTS.iter().find(|client| client.id == id)
}
