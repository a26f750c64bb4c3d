//! Sets the soname of the shared library. Its number changes when programs must be recompiled.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libbifrost_rdm.so.0");
    println!("cargo:rerun-if-changed=build.rs");
}
