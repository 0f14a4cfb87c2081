//! Lists and descriptions of models: the server's answers and the filtered ones.

use cynode_inference::{
    AllowedModels, Locality, ModelList, Refusal, RefusalCode, ServedModel, ShownModel,
    limits::{
        MAX_LIST_BYTES, MAX_LIST_DEPTH, MAX_LIST_NODES, MAX_LISTED_ITEMS, MAX_LISTED_MODELS,
        MAX_LISTED_TEXT_BYTES,
    },
    server_version,
};
use serde_json::{Value, json};

const TAGS: &str = r#"{"models":[
  {"name":"llama3.2:latest","model":"llama3.2:latest","modified_at":"2026-11-01T10:00:00Z","size":2019393189,
   "digest":"a80c4f17acd55265feec403c7aef86be0c25983ab279d83f3bcd3abbcb5b8b72",
   "details":{"parent_model":"/root/base","format":"gguf","family":"llama","families":["llama"],
     "parameter_size":"3.2B","quantization_level":"Q4_K_M","secret":1},
   "capabilities":["completion","tools"],"path":"/root/.ollama/models"},
  {"name":"gpt-oss:120b-cloud","model":"gpt-oss:120b-cloud","remote_model":"gpt-oss:120b",
   "remote_host":"https://ollama.com:443","size":384},
  {"name":"borrowed","remote_host":"http://10.0.0.7:11434"},
  {"name":"private:latest","model":"private:latest","size":1}
]}"#;

const MODELS: &str = r#"{"object":"list","data":[
  {"id":"Org/Big-7B","object":"model","created":1700000000,"owned_by":"vllm","root":"/models/big",
   "parent":null,"max_model_len":32768,"permission":[{"id":"modelperm"}]},
  {"id":"llama3.2:latest","object":"model","created":-1,"owned_by":7},
  {"id":"private","object":"model"}
]}"#;

fn allowed(names: &[&str]) -> AllowedModels {
    AllowedModels::new(names.iter().map(|name| (*name).to_owned()))
}

fn parsed(json: &[u8]) -> Value {
    serde_json::from_slice(json).expect("JSON")
}

#[test]
fn a_list_of_ollama_shows_allowed_models_without_hosts_and_paths() {
    let mut list = ModelList::read_tags(TAGS.as_bytes()).expect("read");
    assert_eq!(list.models.len(), 4);
    list.retain_allowed(&allowed(&["llama3.2", "gpt-oss:120b-cloud"]));
    assert_eq!(
        parsed(&list.to_json()),
        json!({"models": [
            {
                "name": "llama3.2:latest",
                "model": "llama3.2:latest",
                "modified_at": "2026-11-01T10:00:00Z",
                "size": 2_019_393_189_u64,
                "digest": "a80c4f17acd55265feec403c7aef86be0c25983ab279d83f3bcd3abbcb5b8b72",
                "details": {
                    "format": "gguf",
                    "family": "llama",
                    "families": ["llama"],
                    "parameter_size": "3.2B",
                    "quantization_level": "Q4_K_M",
                },
                "capabilities": ["completion", "tools"],
            },
            {"name": "gpt-oss:120b-cloud", "model": "gpt-oss:120b-cloud", "size": 384},
        ]})
    );
    list.remove_external();
    let names: Vec<&str> = list
        .models
        .iter()
        .map(|model| model.name.as_str())
        .collect();
    assert_eq!(names, ["llama3.2:latest"]);
    list.retain_allowed(&AllowedModels::default());
    assert_eq!(parsed(&list.to_json()), json!({"models": []}));
}

#[test]
fn a_list_of_openai_shows_allowed_models_without_paths() {
    let mut list = ModelList::read_models(MODELS.as_bytes()).expect("read");
    list.retain_allowed(&allowed(&["Org/Big-7B", "llama3.2"]));
    assert_eq!(
        parsed(&list.to_json()),
        json!({"object": "list", "data": [
            {
                "id": "Org/Big-7B",
                "object": "model",
                "created": 1_700_000_000,
                "owned_by": "vllm",
                "max_model_len": 32_768,
            },
            {"id": "llama3.2:latest", "object": "model"},
        ]})
    );
    list.remove_external();
    assert_eq!(
        list.models.len(),
        2,
        "the list does not say where a model runs"
    );
}

#[test]
fn where_a_model_runs_is_what_the_server_says() {
    let list = ModelList::read_tags(TAGS.as_bytes()).expect("read");
    for (name, locality) in [
        ("llama3.2", Locality::Local),
        ("gpt-oss:120b-cloud", Locality::External),
        ("borrowed:latest", Locality::External),
    ] {
        assert_eq!(
            list.find(name).expect("listed").locality,
            locality,
            "{name}"
        );
    }
    assert_eq!(list.find("other"), None);
    let list = ModelList::read_models(MODELS.as_bytes()).expect("read");
    assert_eq!(
        list.find("llama3.2").expect("listed").locality,
        Locality::Unknown
    );

    for (fields, locality) in [
        (r#""remote_host":"","remote_model":"""#, Locality::Local),
        (r#""remote_host":null"#, Locality::Local),
        (r#""remote_host":"http://x""#, Locality::External),
        (
            r#""remote_host":"","remote_host":"http://x""#,
            Locality::External,
        ),
        (
            r#""remote_host":"http://x","remote_host":"""#,
            Locality::External,
        ),
        (r#""remote_model":"x""#, Locality::External),
        (r#""remote_model":{}"#, Locality::External),
    ] {
        let tags = format!(r#"{{"models":[{{"name":"x",{fields}}}]}}"#);
        let list = ModelList::read_tags(tags.as_bytes()).expect("read");
        assert_eq!(list.models[0].locality, locality, "{fields}");
        let shown = ShownModel::read(format!("{{{fields}}}").as_bytes()).expect("read");
        assert_eq!(shown.locality, locality, "{fields}");
    }
}

#[test]
fn entries_without_a_clear_name_are_left_out() {
    for entry in [
        json!({}),
        json!("x"),
        json!({"name": ""}),
        json!({"name": 7}),
        json!({"name": "x\u{1b}[31m"}),
        json!({"name": "x".repeat(257)}),
        json!({"name": "x", "model": "private"}),
        json!({"name": "x", "model": 7}),
    ] {
        let tags = json!({"models": [entry, {"name": "y"}, {"model": "z"}]}).to_string();
        let list = ModelList::read_tags(tags.as_bytes()).expect("read");
        let names: Vec<&str> = list
            .models
            .iter()
            .map(|model| model.name.as_str())
            .collect();
        assert_eq!(names, ["y", "z"], "{entry}");
    }
}

#[test]
fn fields_beyond_their_bounds_are_left_out() {
    let digest = |length: usize| {
        let tags = json!({"models": [{"name": "x", "digest": "d".repeat(length)}]}).to_string();
        let list = ModelList::read_tags(tags.as_bytes()).expect("read");
        parsed(&list.to_json())["models"][0].get("digest").is_some()
    };
    assert!(digest(MAX_LISTED_TEXT_BYTES));
    assert!(!digest(MAX_LISTED_TEXT_BYTES + 1));
    let capabilities = |count: usize| {
        let tags = json!({"models": [{"name": "x", "capabilities": vec!["c"; count]}]});
        let list = ModelList::read_tags(tags.to_string().as_bytes()).expect("read");
        parsed(&list.to_json())["models"][0]
            .get("capabilities")
            .is_some()
    };
    assert!(capabilities(MAX_LISTED_ITEMS));
    assert!(!capabilities(MAX_LISTED_ITEMS + 1));
}

fn assert_unreadable<T: std::fmt::Debug>(result: Result<T, Refusal>, what: &str) {
    let refusal = result.expect_err(what);
    assert_eq!(refusal.code, RefusalCode::InferenceUnavailable, "{what}");
    assert!(refusal.message.is_ascii(), "{refusal}");
}

#[test]
fn what_is_no_answer_makes_inference_unavailable() {
    for json in ["", "x", "[]", "null", "\"models\"", "{", "{}{}", "<html>"] {
        assert_unreadable(ModelList::read_tags(json.as_bytes()), json);
        assert_unreadable(ModelList::read_models(json.as_bytes()), json);
        assert_unreadable(ServedModel::read(json.as_bytes()), json);
        assert_unreadable(ShownModel::read(json.as_bytes()), json);
        assert_unreadable(server_version(json.as_bytes()), json);
    }
    assert_unreadable(ModelList::read_tags(b"{\"models\":{}}"), "an object");
    assert_unreadable(ServedModel::read(b"{\"object\":\"model\"}"), "no id");
    assert_unreadable(server_version(b"{\"version\":7}"), "a number");
    for json in ["{}", "{\"models\":null}", "{\"models\":[]}"] {
        let list = ModelList::read_tags(json.as_bytes()).expect("read");
        assert_eq!(list.to_json(), b"{\"models\":[]}");
    }
}

#[test]
fn lists_are_bounded() {
    let models = |count: usize| {
        let tags = json!({"models": vec![json!({"name": "x"}); count]}).to_string();
        ModelList::read_tags(tags.as_bytes())
    };
    assert_eq!(
        models(MAX_LISTED_MODELS).expect("read").models.len(),
        MAX_LISTED_MODELS
    );
    assert_unreadable(models(MAX_LISTED_MODELS + 1), "models");

    let bytes = |length: usize| {
        let start = "{\"models\":[],\"x\":\"";
        let text = format!("{start}{}\"}}", "x".repeat(length - start.len() - 2));
        ModelList::read_tags(text.as_bytes())
    };
    assert!(bytes(MAX_LIST_BYTES).is_ok());
    assert_unreadable(bytes(MAX_LIST_BYTES + 1), "bytes");

    // The object, two names and the outer lists count too.
    let nodes = |count: usize| {
        let text = json!({"models": [], "x": vec![0; count - 5]}).to_string();
        ModelList::read_tags(text.as_bytes())
    };
    assert!(nodes(MAX_LIST_NODES).is_ok());
    assert_unreadable(nodes(MAX_LIST_NODES + 1), "nodes");

    let depth = |depth: usize| {
        let lists = format!("{}{}", "[".repeat(depth - 1), "]".repeat(depth - 1));
        ModelList::read_tags(format!("{{\"x\":{lists}}}").as_bytes())
    };
    assert!(depth(MAX_LIST_DEPTH).is_ok());
    assert_unreadable(depth(MAX_LIST_DEPTH + 1), "depth");
}

#[test]
fn the_description_of_a_model_shows_its_sizes_only() {
    let show = json!({
        "license": "MIT",
        "modelfile": "FROM /root/.ollama/models/blobs/sha256-00",
        "parameters": "stop \"x\"",
        "template": "{{ .Prompt }}",
        "system": "You are secret.",
        "messages": [{"role": "user", "content": "x"}],
        "remote_host": "https://ollama.com:443",
        "details": {"parent_model": "", "format": "gguf", "context_length": 131_072},
        "model_info": {
            "general.architecture": "llama",
            "general.parameter_count": 3_212_749_888_u64,
            "general.name": "x",
            "llama.context_length": 131_072,
            "llama.embedding_length": 3_072,
            "llama.block_count": 28,
            "llama\n.context_length": 1,
            "general.context_length.x": 1,
            "tokenizer.ggml.tokens": ["a"],
            "tokenizer.chat_template": "x",
        },
        "capabilities": ["completion"],
        "modified_at": "2026-11-01T10:00:00Z",
    });
    let shown = ShownModel::read(show.to_string().as_bytes()).expect("read");
    assert_eq!(shown.locality, Locality::External);
    assert_eq!(
        parsed(&shown.to_json()),
        json!({
            "modified_at": "2026-11-01T10:00:00Z",
            "details": {"format": "gguf", "context_length": 131_072},
            "capabilities": ["completion"],
            "model_info": {
                "general.architecture": "llama",
                "general.parameter_count": 3_212_749_888_u64,
                "llama.context_length": 131_072,
                "llama.embedding_length": 3_072,
            },
        })
    );
}

#[test]
fn one_model_and_the_version_are_shown_likewise() {
    let model = br#"{"id":"m","object":"x","created":1,"owned_by":"library","root":"/models/m"}"#;
    let model = ServedModel::read(model).expect("read");
    assert_eq!(model.name, "m");
    assert_eq!(
        parsed(&model.to_json()),
        json!({"id": "m", "object": "model", "created": 1, "owned_by": "library"})
    );
    let version = server_version(br#"{"version":"0.12.0","commit":"x"}"#).expect("read");
    assert_eq!(version, br#"{"version":"0.12.0"}"#);
}
