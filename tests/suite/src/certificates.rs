//! Certificates of servers that tests run.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

/// The PEM files of a server: the authority that signed its certificate, the certificate, its key.
#[derive(Clone, Debug)]
pub struct Certificates {
    pub authority: PathBuf,
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl Certificates {
    /// A certificate for these names, such as `IP:127.0.0.1,DNS:localhost`, and a new authority.
    pub fn create(directory: &Path, names: &str) -> Result<Self> {
        let [
            authority,
            authority_key,
            certificate,
            request,
            key,
            extensions,
        ] = [
            "ca.pem", "ca.key", "cert.pem", "cert.csr", "cert.key", "cert.ext",
        ]
        .map(|name| directory.join(name));
        fs_err::write(
            &extensions,
            format!("subjectAltName={names}\nbasicConstraints=CA:FALSE\n"),
        )?;
        openssl(
            &[
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=test authority",
            ],
            &[("-keyout", &authority_key), ("-out", &authority)],
        )?;
        openssl(
            &[
                "req",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-subj",
                "/CN=worker",
            ],
            &[("-keyout", &key), ("-out", &request)],
        )?;
        openssl(
            &["x509", "-req", "-days", "2", "-CAcreateserial"],
            &[
                ("-in", &request),
                ("-CA", &authority),
                ("-CAkey", &authority_key),
                ("-extfile", &extensions),
                ("-out", &certificate),
            ],
        )?;
        Ok(Self {
            authority,
            certificate,
            key,
        })
    }
}

fn openssl(arguments: &[&str], paths: &[(&str, &Path)]) -> Result<()> {
    let mut command = Command::new("openssl");
    command.args(arguments);
    for (option, path) in paths {
        command.arg(option).arg(path);
    }
    let output = command
        .output()
        .context("openssl is needed for this test")?;
    ensure!(
        output.status.success(),
        "openssl: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
