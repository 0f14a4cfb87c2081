//! The default image has what coding work needs: for an ordinary user, on a read-only root, without
//! a network.

use anyhow::{Result, ensure};
use cynode_api::{ExecRequest, LimitsRequest};
use cynode_tests::{Options, RUNNER, World, session, sh};

/// A command, and what it prints.
const COMMANDS: &[(&str, &str)] = &[
    // Python
    ("python --version | cut -d. -f1", "Python 3\n"),
    (
        "python3 -c 'import numpy, requests; print(numpy.arange(4).sum(), requests.codes.ok)'",
        "6 200\n",
    ),
    (
        "printf 'def test():\\n    assert 1 + 1 == 3\\n' > test_sum.py; pytest -q \
         >out 2>&1; echo $?; grep -c '^E .*assert (1 + 1) == 3' out",
        "1\n1\n",
    ),
    // Of the same size, within the same second: bytecode would hide it.
    (
        "sed -i 's/3/2/' test_sum.py; pytest -q >out 2>&1; echo $?; find . -name __pycache__",
        "0\n",
    ),
    (
        "python3 -m venv env && env/bin/pip --version | cut -d' ' -f1,3-4; rm -r env",
        "pip from /workspace/env/lib/python3.*\n",
    ),
    // Wheels install for the user, without --break-system-packages.
    (
        "mkdir -p wheel/greeting-1.dist-info && cd wheel && touch greeting-1.dist-info/RECORD && \
         printf 'def main(): print(\"from a wheel\")\\n' > greeting.py && printf \
         'Metadata-Version: 2.1\\nName: greeting\\nVersion: 1\\n' > \
         greeting-1.dist-info/METADATA && printf 'Wheel-Version: 1.0\\nRoot-Is-Purelib: \
         true\\nTag: py3-none-any\\n' > greeting-1.dist-info/WHEEL && printf \
         '[console_scripts]\\ngreet = greeting:main\\n' > \
         greeting-1.dist-info/entry_points.txt && zip -q -r greeting-1-py3-none-any.whl . && pip \
         install -q ./*.whl && cd / && greet",
        "from a wheel\n",
    ),
    (
        "timeout 10 pip install nosuch >out 2>&1; echo $?; grep -c 'No matching distribution' out",
        "1\n1\n",
    ),
    // Node.js
    ("node --version | cut -d. -f1", "v22\n"),
    ("npm --version | grep -c '^[0-9]'", "1\n"),
    (
        "mkdir package && cd package && npm init -y >/dev/null && npm pkg set \
         scripts.test='node -e \"console.log(6 * 7)\"' && npm test --silent",
        "42\n",
    ),
    (
        "timeout 10 npm install nosuch >out 2>&1; echo $?; grep -q 403 out && echo denied || cat \
         out",
        "1\ndenied\n",
    ),
    (
        "cd package && npm install --global --silent . && npm ls --global --parseable | tail -n 1",
        "/home/agent/.local/lib/node_modules/package\n",
    ),
    // C and C++
    (
        "printf '#include <stdio.h>\\nint main(void) { puts(\"C\"); }\\n' > a.c; printf 'a: \
         a.c\\n\\tgcc -o a a.c\\n' > Makefile; make -s && ./a",
        "C\n",
    ),
    (
        "printf '#include <iostream>\\nint main() { std::cout << \"C++\\\\n\"; }\\n' > b.cc; g++ \
         -o b b.cc && ./b",
        "C++\n",
    ),
    ("pkg-config --version | grep -c '^[0-9]'", "1\n"),
    // Tools
    (
        "echo text > file; curl --silent file:///workspace/file",
        "text\n",
    ),
    ("echo '{\"a\": [1, 2]}' | jq -c .a", "[1,2]\n"),
    ("printf 'one\\ntwo\\n' > words; rg -n two words", "2:two\n"),
    ("sqlite3 :memory: 'select 6 * 7'", "42\n"),
    ("ps -o comm= -p 1 | wc -l", "1\n"),
    (
        "zip -q z.zip words && rm words && unzip -q z.zip && cat words",
        "one\ntwo\n",
    ),
    (
        "vim -es -c '%s/one/three/' -c wq words; cat words",
        "three\ntwo\n",
    ),
    // UTF-8
    (
        "git init -q repo && cd repo && echo grün > 'größe ☃' && git add . && git status --short \
         && git commit -qm 'Füge ☃ hinzu' && git log --format=%s && ls && less 'größe ☃'",
        "A  \"größe ☃\"\nFüge ☃ hinzu\ngröße ☃\ngrün\n",
    ),
    (
        "cd repo && python3 -c 'import os, sys; print(sys.stdout.encoding, os.listdir()[-1] and \
         \"größe ☃\" in os.listdir(), open(\"größe ☃\").read().strip())'",
        "utf-8 True grün\n",
    ),
    (
        "cd repo && vim -es -c 'normal ggx' -c 'normal $x' -c wq 'größe ☃'; cat 'größe ☃'",
        "rü\n",
    ),
];

#[tokio::test]
async fn the_default_image_has_the_tools_for_coding() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let mut request = session();
    RUNNER.clone_into(&mut request.image_ref);
    request.limits = Some(LimitsRequest {
        memory_bytes: Some(1 << 30),
        ..Default::default()
    });
    let id = client.create_session(&request).await?.session_id;
    let mut faults = Vec::new();
    for (script, expected) in COMMANDS {
        let ran = client
            .exec(
                id,
                &ExecRequest {
                    timeout_ms: 120_000,
                    ..sh(script)
                },
            )
            .await?;
        let matches = match expected.strip_suffix("*\n") {
            Some(start) => ran.stdout.starts_with(start),
            None => ran.stdout == *expected,
        };
        if !matches {
            faults.push(format!("{script}\n{}{}", ran.stdout, ran.stderr));
        }
    }
    ensure!(faults.is_empty(), "{}", faults.join("\n"));
    Ok(())
}
