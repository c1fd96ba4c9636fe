// Package mounting mounts and unmounts by system calls, as mount(8) and umount(8) of util-linux would. It knows bind
// mounts and tmpfs. The caller runs the programs for everything else.
package mounting

import (
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A Request has the arguments of mount(8): `mount ARGUMENTS -t FSTYPE -o OPTIONS SOURCE TARGET`.
type Request struct {
	Source, Target, FSType string
	Options, Arguments     []string
}

// call has the arguments of one mount(2).
type call struct {
	source, fstype string
	flags          uintptr
	data           string
	// keep are the flags that the mount keeps if it has them.
	keep uintptr
}

// restrictions are the flags that a bind mount keeps when it gets others. mount(2) would clear them. mount(8) of util-linux
// 2.39 and later keeps them, by mount_setattr(2).
const restrictions = unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOSYMFOLLOW

// flag says which flags of mount(2) an option sets and clears.
type flag struct{ set, clear uintptr }

// flags are the options that mount(8) translates to flags. A later option overrides an earlier one.
var flags = map[string]flag{
	"defaults":      {},
	"ro":            {set: unix.MS_RDONLY},
	"rw":            {clear: unix.MS_RDONLY},
	"noexec":        {set: unix.MS_NOEXEC},
	"exec":          {clear: unix.MS_NOEXEC},
	"nosuid":        {set: unix.MS_NOSUID},
	"suid":          {clear: unix.MS_NOSUID},
	"nodev":         {set: unix.MS_NODEV},
	"dev":           {clear: unix.MS_NODEV},
	"noatime":       {set: unix.MS_NOATIME},
	"atime":         {clear: unix.MS_NOATIME},
	"nodiratime":    {set: unix.MS_NODIRATIME},
	"diratime":      {clear: unix.MS_NODIRATIME},
	"relatime":      {set: unix.MS_RELATIME},
	"norelatime":    {clear: unix.MS_RELATIME},
	"strictatime":   {set: unix.MS_STRICTATIME},
	"nostrictatime": {clear: unix.MS_STRICTATIME},
	"nosymfollow":   {set: unix.MS_NOSYMFOLLOW},
	"symfollow":     {clear: unix.MS_NOSYMFOLLOW},
}

// propagations are the options for which mount(8) calls mount(2) once more.
var propagations = map[string]uintptr{
	"shared":      unix.MS_SHARED,
	"rshared":     unix.MS_SHARED | unix.MS_REC,
	"slave":       unix.MS_SLAVE,
	"rslave":      unix.MS_SLAVE | unix.MS_REC,
	"private":     unix.MS_PRIVATE,
	"rprivate":    unix.MS_PRIVATE | unix.MS_REC,
	"unbindable":  unix.MS_UNBINDABLE,
	"runbindable": unix.MS_UNBINDABLE | unix.MS_REC,
}

// tmpfsOptions are the options that mount(8) passes to tmpfs as they are. If an option has a check, other values of it
// mean something to mount(8), such as the name of a user.
var tmpfsOptions = map[string]func(string) bool{
	"size": nil, "nr_blocks": nil, "nr_inodes": nil, "mode": nil, "huge": nil, "mpol": nil,
	"noswap": nil, "inode32": nil, "inode64": nil, "uid": isNumber, "gid": isNumber,
}

func isNumber(value string) bool {
	_, err := strconv.ParseUint(value, 10, 32)
	return err == nil
}

// options are the parsed options of a request.
type options struct {
	bind, recursive, remount bool
	flags                    uintptr
	// cleared are the flags that options clear explicitly, such as exec.
	cleared uintptr
	// flagged is true if an option set or cleared flags of the mount.
	flagged      bool
	propagations []uintptr
	data         []string
}

// plan returns the calls of mount(2) for a request. It returns false if this package does not know how mount(8) would
// treat the request.
func plan(request Request) ([]call, bool) {
	if slices.ContainsFunc(request.Arguments, func(argument string) bool { return argument != "--no-canonicalize" }) {
		return nil, false
	}
	// mount(8) searches fstab for an empty source, and the devices for a tag such as UUID=.
	if request.Source == "" || strings.Contains(request.Source, "=") && !strings.HasPrefix(request.Source, "/") {
		return nil, false
	}
	parsed, known := parse(request.Options)
	if !known {
		return nil, false
	}
	switch {
	case parsed.bind && (request.FSType == "" || request.FSType == "none") && len(parsed.data) == 0:
		return planBind(request, parsed), true
	case !parsed.bind && request.FSType == "tmpfs":
		return planTmpfs(request, parsed)
	default:
		return nil, false
	}
}

func parse(words []string) (options, bool) {
	var parsed options
	for _, word := range strings.Split(strings.Join(words, ","), ",") {
		// mount(8) removes quotes, within which a comma does not separate.
		if strings.ContainsAny(word, "\"'\\ \t\n\x00") {
			return parsed, false
		}
		flag, isFlag := flags[word]
		propagation, isPropagation := propagations[word]
		name, value, _ := strings.Cut(word, "=")
		check, isData := tmpfsOptions[name]
		switch {
		case word == "":
		case word == "bind":
			parsed.bind = true
		case word == "rbind":
			parsed.bind, parsed.recursive = true, true
		case word == "remount":
			parsed.remount = true
		case isFlag:
			parsed.flags = parsed.flags&^flag.clear | flag.set
			parsed.cleared = parsed.cleared&^flag.set | flag.clear
			parsed.flagged = parsed.flagged || flag.set != 0
		case isPropagation:
			parsed.propagations = append(parsed.propagations, propagation)
		case isData && (check == nil || check(value)):
			parsed.data = append(parsed.data, word)
		default:
			return parsed, false
		}
	}
	return parsed, true
}

// planBind returns the calls for a bind mount. The kernel ignores other flags at the call that binds, so mount(8) sets
// them by a second call.
func planBind(request Request, parsed options) []call {
	var calls []call
	if !parsed.remount {
		bind := uintptr(unix.MS_BIND)
		if parsed.recursive {
			bind |= unix.MS_REC
		}
		calls = append(calls, call{source: request.Source, flags: bind})
	}
	if parsed.remount || parsed.flagged {
		calls = append(calls, call{
			source: request.Source,
			flags:  unix.MS_REMOUNT | unix.MS_BIND | parsed.flags,
			keep:   restrictions &^ parsed.cleared,
		})
	}
	return append(calls, propagationCalls(parsed)...)
}

func planTmpfs(request Request, parsed options) ([]call, bool) {
	data := strings.Join(parsed.data, ",")
	// The kernel reads one page, and ignores the rest.
	if len(data) >= unix.Getpagesize() {
		return nil, false
	}
	mount := call{source: request.Source, fstype: "tmpfs", flags: parsed.flags, data: data}
	if parsed.remount {
		mount.flags |= unix.MS_REMOUNT
	}
	return append([]call{mount}, propagationCalls(parsed)...), true
}

func propagationCalls(parsed options) []call {
	var calls []call
	for _, propagation := range parsed.propagations {
		calls = append(calls, call{source: "none", flags: propagation})
	}
	return calls
}
