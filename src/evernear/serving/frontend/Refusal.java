package evernear;

import static java.nio.charset.StandardCharsets.UTF_8;

import io.netty.buffer.Unpooled;
import io.netty.handler.codec.http.DefaultFullHttpResponse;
import io.netty.handler.codec.http.FullHttpResponse;
import io.netty.handler.codec.http.HttpHeaderNames;
import io.netty.handler.codec.http.HttpHeaderValues;
import io.netty.handler.codec.http.HttpResponseStatus;
import io.netty.handler.codec.http.HttpUtil;
import io.netty.handler.codec.http.HttpVersion;
import org.pytorch.serve.http.ErrorResponse;
import org.pytorch.serve.util.JsonUtils;

/** An error in the shape of TorchServe's own. */
final class Refusal {
    private Refusal() {}

    static FullHttpResponse of(HttpResponseStatus status, String type, String message) {
        return Json.of(status, new ErrorResponse(status.code(), type, message));
    }
}

/** Thrown where a request is not let in. */
final class Refused extends RuntimeException {
    private static final long serialVersionUID = 1;

    private final transient FullHttpResponse answer;

    Refused(HttpResponseStatus status, String type, String message) {
        super(message, null, false, false);
        answer = Refusal.of(status, type, message);
        HttpUtil.setKeepAlive(answer, false); // the rest of the request is not to be trusted, or not worth its bytes
    }

    Refused with(CharSequence header, String value) {
        answer.headers().set(header, value);
        return this;
    }

    FullHttpResponse answer() {
        return answer;
    }
}

/** An answer whose body is an object. */
final class Json {
    private Json() {}

    static FullHttpResponse of(HttpResponseStatus status, Object content) {
        String body = JsonUtils.GSON_PRETTY.toJson(content);
        FullHttpResponse answer =
                new DefaultFullHttpResponse(HttpVersion.HTTP_1_1, status, Unpooled.copiedBuffer(body, UTF_8));
        answer.headers().set(HttpHeaderNames.CONTENT_TYPE, HttpHeaderValues.APPLICATION_JSON);
        HttpUtil.setContentLength(answer, answer.content().readableBytes());
        return answer;
    }
}
